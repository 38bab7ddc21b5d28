"""A command builds a model that it only runs forward: its object's hooks take part, and there is no optimizer."""

import pytest

from mplug import Model, Run, hookimpl
from mplug.commands import COMMAND, Selection, build_model, prepare
from mplug_faults import cause_of, failed_part
from mplug_testing.harness import tiny_config


class Probe:
    """The part of a command in the runs that it builds."""

    layer = 7

    def __init__(self) -> None:
        self.units: list[str] = []
        self.unmet: list[str] = []

    @hookimpl
    def adapt_model(self, model: Model) -> None:
        self.units = [name for name, _ in model.module.named_children()]

    @hookimpl
    def offers_selected(self, selection: Selection) -> None:
        self.unmet, selection.unmet = [str(unmet) for unmet in selection.unmet], []

    def fail(self) -> None:
        raise ValueError("a fault")


def forward_run(settings: dict[str, object], probe: Probe) -> Run:
    run = prepare(tiny_config({"trainer.device": "cpu", **settings}), {f"{COMMAND}probe": probe})
    run.trains = False
    return run


def test_a_command_may_let_defaults_compute_what_a_kernel_does_not_serve() -> None:
    probe = Probe()
    model = build_model(forward_run({"kernels.attention": "flash", "trainer.precision": "fp64"}, probe))
    assert all(reason.startswith("kernels/flash cannot serve Attention.core") for reason in probe.unmet)
    assert len(probe.unmet) == sum(one.site.slot == "Attention.core" for one in model.slots) > 0
    assert {one.supplier for one in model.slots if one.site.slot == "Attention.core"} == {"plain torch"}


def test_a_command_sees_the_units_of_all_stages_and_is_not_blamed_for_faults_below() -> None:
    probe = Probe()
    run = forward_run({"parallel.layout": "pp2"}, probe)
    model = build_model(run)
    assert {"embedding", "head"} <= set(probe.units)
    assert "head" not in dict(model.module.named_children())
    with pytest.raises(ValueError, match="a fault") as raised:
        probe.fail()
    assert failed_part(run.hooks, raised.value) == cause_of(raised.value) == "ValueError: a fault"


def test_a_model_that_only_runs_forward_needs_nothing_of_an_optimizer() -> None:
    """Under zero=2, nothing owns the optimizer's states."""
    assert build_model(prepare(tiny_config({"parallel.layout": "zero2"}))).sharding is not None
    assert build_model(forward_run({"parallel.layout": "zero2"}, Probe())).sharding is None
