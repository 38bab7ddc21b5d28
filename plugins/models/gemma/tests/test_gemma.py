"""Gemma keeps the contract of models, and its presets have the published sizes."""

from typing import Any

import pytest
from decoder_fields import examples_of, of_a_family
from library_reference import library_logits
from mplug_gemma import Gemma
from tiny_models import DECODER, billions
from torch import Tensor

from mplug_testing import ModelSuite

WIDE = pytest.mark.wide("suites")
"""The suites of llama and deepseek test the fields that all decoders share in the quick set."""


class TestGemma(ModelSuite):
    plugin = "gemma"
    settings = {
        "kernels.attention": None,
        **DECODER,
        "model.head_dim": 16,
        "model.qk_norm": True,
        "model.attention_soft_cap": 3.0,
        "model.logit_soft_cap": 3.0,
        "model.attention_scale": 0.2,
        "model.window": 4,
        "model.attention_types": ["window", "full"],
        "model.window_rope_theta": 100.0,
        "model.rope_scaling": {"type": "linear", "factor": 8.0},
    }
    layouts = ("tp2",)
    positions = "relative"
    examples = examples_of(Gemma.Config.model_fields)
    beside = of_a_family(Gemma.Config.model_fields)

    @WIDE
    def test_every_field_of_its_config_has_an_effect(self) -> None:
        super().test_every_field_of_its_config_has_an_effect()


class TestGemma3(TestGemma):
    """Without the soft caps of Gemma 2, which the library's Gemma 3 does not have."""

    settings = {name: value for name, value in TestGemma.settings.items() if "soft_cap" not in name}
    settings |= {"model.hidden_size": 16}  # the library keeps its square root in fp32
    layouts = ()
    checks_fields = False

    def reference(self, weights: Any, batch: Any, config: Any) -> Tensor:
        return library_logits(self, weights, batch["tokens"])


SIZES = {
    "2-2b": 2.614,
    "2-9b": 9.242,
    "2-27b": 27.227,
    "3-270m": 0.268,
    "3-1b": 1.0,
    "3-4b": 3.88,
    "3-12b": 11.766,
    "3-27b": 27.009,
}


@pytest.mark.parametrize(("name", "published"), SIZES.items())
def test_a_preset_has_its_published_parameters(name: str, published: float) -> None:
    assert set(SIZES) == set(Gemma.presets)
    assert billions(Gemma, name) == pytest.approx(published, abs=6e-4)
