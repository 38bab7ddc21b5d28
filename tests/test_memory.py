"""Wraps around units, wraps that a run may do without, and short flags that come from distributions' metadata."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from click.testing import CliRunner
from torch import Tensor

import mplug.model.build
from mplug import UNIT, Offer, Run, Site, UsageError, Wrap
from mplug.cli import main
from mplug.cli.options import added_flags
from mplug.config.entry import Entry
from mplug.model.build import build_model
from mplug.registry.entry_points import Registry
from mplug.training.assembly import build
from mplug_nn import experts
from mplug_testing.harness import tiny_run

EXPERTS: dict[str, Any] = {
    "model.name": "mixtral",
    "model.num_layers": 2,
    "model.ffn_hidden_size": 32,
    "model.num_experts": 4,
}


@pytest.fixture
def offering(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Let further offers count, as if plugins had made them."""

    def add(*offers: Offer | Wrap) -> None:
        original = mplug.model.build.collect_offers
        monkeypatch.setattr(mplug.model.build, "collect_offers", lambda run, model: [*original(run, model), *offers])

    return add


def noting(name: str, notes: list[str]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def around(inner: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            notes.append(name)
            return inner(*arguments, **named)

        return call

    return around


def is_block_1(site: Site, run: Run) -> bool:
    return run is not None and site.name == "blocks.1"


@pytest.mark.parametrize("compiler", ["never", "aot_eager"])
@pytest.mark.filterwarnings("ignore")
@pytest.mark.wide("compile", quick=["never"])
def test_units_are_wrapped_from_inner_to_outer_around_what_is_compiled(
    offering: Callable[..., None], compiler: str
) -> None:
    notes: list[str] = []
    for name, layer in (("outer", 20), ("inner", 10)):
        offering(Wrap(UNIT, noting(name, notes), layer, supports=is_block_1, plugin=f"memory/{name}"))
    run = tiny_run({"trainer.compile": compiler})
    parts = build(run)
    parts.stepper.forward_backward(parts.train_loader.take(4), 1)
    assert notes == ["outer", "inner"] * 2, "two micro batches"


def test_two_wraps_of_a_unit_at_one_layer_are_refused_naming_both(offering: Callable[..., None]) -> None:
    offering(*(Wrap(UNIT, lambda inner: inner, 10, plugin=f"memory/{name}") for name in ("a", "b")))
    with pytest.raises(UsageError, match=r"memory/a and memory/b both wrap Unit\.call of 'embedding' at layer 10"):
        build_model(tiny_run({}))


def test_a_wrap_that_is_dispensable_may_be_lost_and_another_may_not(offering: Callable[..., None]) -> None:
    def fused(*arguments: Any) -> Tensor:
        return experts.compute(*arguments)

    around = Wrap("MLP.activation", lambda inner: inner, 1000, plugin="memory/ringo", dispensable=True)
    offering(Offer({"Experts.compute": fused}, plugin="parallel/fused"), around)
    build_model(tiny_run(EXPERTS))
    offering(replace(around, dispensable=False, layer=1001))
    with pytest.raises(UsageError, match=r"the part that memory/ringo puts into MLP\.activation would never run"):
        build_model(tiny_run(EXPERTS))


# Flags.


def flag(name: str, distribution: str, target: str = "memory.ringo.mode") -> Entry:
    return Entry("flags", name, target, distribution, "1.0", "", None, "")


def test_a_flag_that_is_claimed_twice_or_the_hosts_is_left_out_and_the_list_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = [flag("ringo-mode", "acme-ringo"), flag("again", "acme-one"), flag("again", "acme-two")]
    found += [flag("model", "acme-three")]
    monkeypatch.setattr(Registry, "flags", lambda _: found)
    assert added_flags({"model"}) == {"ringo_mode": found[0]}
    said = CliRunner().invoke(main, ["plugins", "list"]).output
    assert (
        "--again of acme-one 1.0 and acme-two 1.0 is ignored, because several distributions claim it; use --set" in said
    )
    assert "--model of acme-three 1.0 is ignored, because the host has an option of this name" in said
    assert "--ringo-mode" not in said


def test_a_flag_of_a_distribution_sets_its_field_and_is_its_source() -> None:
    said = CliRunner().invoke(main, ["config", "show", "--sources", "--recompute", "selective"])
    assert said.exit_code == 0, said.output
    (line,) = [line for line in said.output.splitlines() if line.startswith("memory.recompute.mode")]
    assert line.split()[1:] == ['"selective"', "--recompute"]
    assert "memory" not in CliRunner().invoke(main, ["explain", "--preset", "nano"]).output, "naming it does it"
