"""The suite for adapters catches mistakes of an author that no run would show."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from mplug_lora import LoRA

from mplug import Model
from mplug_testing import AdapterSuite, Fault

Change = Callable[[Model], None]


class OfLoRA(AdapterSuite):
    __test__ = False
    plugin = "lora"
    settings = {"adapters.lora.rank": 2, "model.num_layers": 1, "adapters.lora.targets": ["attention"]}


def with_other_scale(model: Model) -> None:
    merge = model.merges["blocks.0.attn.out.weight"]
    forgotten = replace(merge, compute=lambda w, a, b: w + b @ a)
    model.merges["blocks.0.attn.out.weight"] = forgotten


def with_another_norm(model: Model) -> None:
    model.module.get_submodule("blocks.0.norm1").eps = 1e-2  # type: ignore[assignment]


@pytest.mark.parametrize("change", [with_other_scale, with_another_norm])
def test_an_export_that_computes_something_else_is_a_fault(change: Change, monkeypatch: pytest.MonkeyPatch) -> None:
    original = LoRA.adapt_model

    def adapt_model(self: LoRA, run: Any, model: Model) -> None:
        original(self, run, model)
        change(model)

    adapt_model.mplug_impl = original.mplug_impl  # type: ignore[attr-defined]
    monkeypatch.setattr(LoRA, "adapt_model", adapt_model)
    with pytest.raises(Fault, match="an exported model has other logits than the run"):
        OfLoRA().test_an_export_computes_what_the_adapted_model_computes("tiny")


def test_a_suite_without_layouts_runs_every_installed_strategy() -> None:
    found: dict[str, Any] = {}
    asking = SimpleNamespace(fixturenames=["layout"], parametrize=lambda name, values: found.update({name: values}))
    OfLoRA().pytest_generate_tests(asking)
    assert {"tp2", "fsdp2", "pp2", "cp2", "zero2"} <= {*found["layout"]}
