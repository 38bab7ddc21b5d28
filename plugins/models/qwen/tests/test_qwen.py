"""Qwen keeps the contract of models, and its presets have the published sizes."""

from typing import Any

import pytest
from decoder_fields import examples_of, of_a_family
from library_reference import library_logits
from mplug_qwen import Qwen
from tiny_models import DECODER, billions
from torch import Tensor

from mplug_testing import ModelSuite

WIDE = pytest.mark.wide("suites")
"""The suites of llama and deepseek test the fields that all decoders share in the quick set."""


class TestQwenOfExperts(ModelSuite):
    """Qwen3-MoE, with an MLP in every second block."""

    plugin = "qwen"
    settings = {
        **DECODER,
        "model.num_experts": 4,
        "model.moe_ffn_hidden_size": 24,
        "model.feed_forward_types": ["mlp", "experts"],
    }
    layouts = ("ep2",)
    positions = "relative"
    examples = examples_of(Qwen.Config.model_fields)
    beside = of_a_family(Qwen.Config.model_fields, {"num_dense_layers": {"model.feed_forward_types": None}})

    def reference(self, weights: Any, batch: Any, config: Any) -> Tensor:
        return library_logits(self, weights, batch["tokens"])

    @WIDE
    def test_every_field_of_its_config_has_an_effect(self) -> None:
        super().test_every_field_of_its_config_has_an_effect()


SIZES = {
    "2.5-0.5b": 0.494,
    "2.5-1.5b": 1.544,
    "2.5-3b": 3.086,
    "2.5-7b": 7.616,
    "2.5-14b": 14.770,
    "2.5-32b": 32.764,
    "2.5-72b": 72.706,
    "3-0.6b": 0.596,
    "3-1.7b": 1.721,
    "3-4b": 4.022,
    "3-8b": 8.191,
    "3-14b": 14.768,
    "3-32b": 32.762,
    "3-30b-a3b": 30.532,
    "3-235b-a22b": 235.094,
}


@pytest.mark.parametrize(("name", "published"), SIZES.items())
def test_a_preset_has_its_published_parameters(name: str, published: float) -> None:
    assert set(SIZES) == set(Qwen.presets)
    assert billions(Qwen, name) == pytest.approx(published, abs=6e-4)
