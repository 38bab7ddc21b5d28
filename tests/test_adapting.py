"""The hook adapt_model: what a plugin may change of a model, and that every way of computing calls the adapters."""

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny_models
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from mplug import Declared, Flops, Init, Mesh, Model, Parameter, UsageError, declare
from mplug.model.build import build_model
from mplug.model.slots.fill import sites
from mplug_adapting import adapt
from mplug_nn import ADAPTERS, Entries, Inits, Linear
from mplug_pretrained import Adapters, ExternalNames
from mplug_pretrained.adapter_files import refuse_other_adapters, unpublished
from mplug_testing.harness import tiny_run, train_steps

LORA: dict[str, Any] = {"adapters.lora.rank": 3, "model.num_layers": 2}


OUT = "blocks.0.attn.out"


class Shift(nn.Module):
    """An adapter that adds a vector."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.empty(width))

    def plan_entries(self, inits: Inits) -> Entries:
        return {"shift": Parameter(("embed",), Init("constant", value=0.0))}

    def forward(self, x: Tensor, y: Tensor, linear: Linear) -> Tensor:
        return y + self.shift


def adapted_by(change: Callable[[Model], None]) -> Model:
    """The tiny model as a plugin with this hook adapts it."""
    run = tiny_run(LORA)
    (implementation,) = run.hooks.call.adapt_model.get_hookimpls()
    implementation.function, implementation.argnames = lambda model: change(model), ("model",)
    return build_model(run)


class Added(Shift):
    """The same with a product, which it states as a linear."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.linear = declare(Linear(width, width, bias=False), weight=Declared(("embed", "added")))


def test_the_work_of_an_attached_module_joins_that_of_the_plan() -> None:
    def attach(model: Model, states_work: bool) -> None:
        model.freeze([*model.parameters()])
        if states_work:
            model.plan = replace(model.plan, work=model.work)
        model.attach({f"{OUT}.adapter": Added(32)})

    for states_work in (False, True):
        model = adapted_by(partial(attach, states_work=states_work))
        (work,) = (one for one in model.work if one.name == f"{OUT}.adapter.linear.weight")
        assert (work.unit, work.flops, work.is_weight) == ("blocks.0", Flops(6 * 32 * 32, 0), True)
        # A plan with work of its own cannot say what precedes an added module, so the whole unit may.
        assert work.after == ("blocks.0",) if states_work else work.after[-1] == f"{OUT}.adapter.shift"
        assert model.passes is not None
        assert model.passes.unstated == Flops(0, 0)
        assert work.name not in model.passes.no_wgrad
        trained = {name: one.shape for name, one in model.placements.items() if one.parameter.trainable}
        assert trained == {f"{OUT}.adapter.shift": (32,), work.name: (32, 32)}


def publishing(name: str) -> Callable[..., None]:
    """An adapt_model that trains a vector of one layer and states how PEFT would name it."""

    def adapt_model(run: Any, model: Model) -> None:
        model.attach({f"{name}.adapter": Shift(32)})
        model.adapters = Adapters(
            "peft", ExternalNames({f"{name}.adapter.shift": f"{name}.shift"}), {"peft_type": "SHIFT"}
        )

    return adapt_model


def together(*parts: Callable[..., None], trained: str = "") -> Model:
    """The tiny model as several plugins adapt it, one after the other."""
    model = build_model(tiny_run({"model.num_layers": 2}))
    model.freeze([name for name in model.parameters() if name != trained])
    model.placements = {}  # plugins adapt a model before it is placed
    hooks = SimpleNamespace(layered=lambda _: [(f"adapters/{n}", part) for n, part in enumerate(parts)])
    adapt(SimpleNamespace(hooks=hooks), model)  # type: ignore[arg-type]
    model.place(Mesh.of([], 1), None)
    return model


def test_two_plugins_that_state_the_published_form_are_refused() -> None:
    assert unpublished(together(publishing(OUT))) == ""
    with pytest.raises(UsageError, match="adapters/0 and adapters/1 both state the published form"):
        together(publishing(OUT), publishing("blocks.1.attn.out"))


def test_a_published_form_without_all_that_is_trained_is_refused() -> None:
    def more(run: Any, model: Model) -> None:
        model.attach({"blocks.1.attn.out.adapter": Shift(32)})

    model = together(publishing(OUT), more)
    assert "the external names lack 'blocks.1.attn.out.adapter.shift'" in unpublished(model)

    model = together(publishing(OUT), trained="head.norm.weight")
    assert "the run also trains 'head.norm.weight' of the model itself" in unpublished(model)


def test_without_a_check_of_the_plugin_every_field_of_a_folder_must_be_that_of_the_run(tmp_path: Path) -> None:
    model = together(publishing(OUT))
    assert model.adapters is not None
    model.adapters = replace(model.adapters, path=tmp_path)
    save_file({"blocks.0.attn.out.shift": torch.zeros(32)}, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "SHIFT", "r": null}')
    refuse_other_adapters(model)
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "SHIFT", "r": 1}')
    with pytest.raises(UsageError, match=r"have r=1 in adapter_config\.json, and those of the run have None; use the"):
        refuse_other_adapters(model)


def renamed(model: Model) -> None:
    block = model.module.get_submodule("blocks.0.attn")
    block.extra, block.out.weight = nn.Parameter(torch.empty(2, device="meta")), None  # type: ignore[assignment]
    del model.plan.parameters["blocks.*.attn.out.weight"]  # type: ignore[attr-defined]
    model.plan.parameters["blocks.1.attn.out.weight"] = Parameter(("embed", "heads"), Init("constant"))  # type: ignore[index]
    model.plan.parameters["blocks.0.attn.extra"] = Parameter(("embed",), Init("constant"))  # type: ignore[index]


def reshaped(model: Model) -> None:
    out = model.module.get_submodule(OUT)
    out.weight = nn.Parameter(torch.empty(32, 64, device="meta"))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (renamed, f"adapters/lora removes or renames the parameter '{OUT}.weight'"),
        (reshaped, f"adapters/lora changes the shape or the dimensions of '{OUT}.weight' from (32, 32)"),
        (lambda model: model.attach({"head.project.adapter": Shift(32)}), "'head.project' cannot have an adapter"),
        (lambda model: model.attach({f"{OUT}.weight": Shift(32)}), f"'{OUT}' has the attribute 'weight' already"),
        (lambda model: model.freeze(model.parameters()), "freezes every parameter"),
    ],
)
def test_a_change_that_no_run_can_train_is_refused(change: Callable[[Model], None], said: str) -> None:
    with pytest.raises((UsageError, ValueError), match=re.escape(said)):
        adapted_by(change)


def test_freezing_adapters_alone_is_possible() -> None:
    model = build_model(tiny_run({**LORA, "model.frozen": ["blocks.0"]}))
    trained = {name.split(".")[1] for name, one in model.placements.items() if one.parameter.trainable}
    assert trained == {"1"}


OF_EXPERTS = {**tiny_models.EXPERTS, "adapters.lora.targets": ["experts"]}


@pytest.mark.parametrize(
    ("settings", "slot"), [({}, "MLP.core"), (OF_EXPERTS, "Experts.compute")], ids=["mlp", "experts"]
)
def test_a_supplier_that_would_not_call_adapters_does_not_fit(settings: dict[str, Any], slot: str) -> None:
    """Its `supports` sees a need that it does not know; the sites of other slots keep their needs."""
    found = {site.slot: site for site in sites(build_model(tiny_run({**LORA, **settings})).module)}
    without = {name: value for name, value in settings.items() if not name.startswith("adapters")}
    plain = {site.slot: site for site in sites(build_model(tiny_run({"model.num_layers": 2, **without})).module)}
    assert found[slot].needs == plain[slot].needs | {ADAPTERS}
    assert "adapters" in found[slot].lacking(())
    others = found.keys() - {slot}
    assert {name: found[name].needs for name in others} == {name: plain[name].needs for name in others}
    fused = {"Linear.norm_product", "Linear.activation_product"}
    assert slot != "MLP.core" or not fused & found.keys(), "what precedes an adapted layer has a second reader"


SELECTIVE = {"memory.recompute.mode": "selective"}


@pytest.mark.parametrize(
    ("settings", "recomputes"),
    [
        ({}, {**SELECTIVE, "memory.recompute.slots": ["mlp"]}),
        ({}, {"memory.recompute.mode": "full"}),
        (OF_EXPERTS, {**SELECTIVE, "memory.recompute.slots": ["Experts.compute"]}),
    ],
    ids=["MLP.core", "unit", "Experts.compute"],
)
@pytest.mark.wide("layouts", quick=["unit", "Experts.compute"])
def test_recomputation_calls_the_adapters_too(settings: dict[str, Any], recomputes: dict[str, Any]) -> None:
    found, expected = (train_steps({**LORA, **settings, **more}) for more in (recomputes, {}))
    assert found.losses == expected.losses
    assert found.norms == expected.norms
    assert all(norm > 0 for norm in found.norms)
