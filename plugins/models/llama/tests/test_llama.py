"""Llama keeps the contract of models, and its presets have the published sizes."""

from typing import Any

import pytest
from decoder_fields import examples_of, of_a_family
from library_reference import library_logits
from mplug_llama import Llama
from tiny_models import DECODER, billions
from torch import Tensor

from mplug_testing import ModelSuite


class TestLlama(ModelSuite):
    plugin = "llama"
    settings = {
        **DECODER,
        "model.tie_embeddings": True,
        "model.rope_scaling": {
            "type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    }
    layouts = ("tp2pp2",)
    positions = "relative"
    examples = examples_of(Llama.Config.model_fields)
    beside = of_a_family(Llama.Config.model_fields)

    def reference(self, weights: Any, batch: Any, config: Any) -> Tensor:
        return library_logits(self, weights, batch["tokens"])


SIZES = {
    "2-7b": 6.738,
    "2-13b": 13.016,
    "2-70b": 68.977,
    "3-8b": 8.030,
    "3-70b": 70.554,
    "3.1-8b": 8.030,
    "3.1-70b": 70.554,
    "3.1-405b": 405.853,
    "3.2-1b": 1.236,
    "3.2-3b": 3.213,
}


@pytest.mark.parametrize(("name", "published"), SIZES.items())
def test_a_preset_has_its_published_parameters(name: str, published: float) -> None:
    assert set(SIZES) == set(Llama.presets)
    assert billions(Llama, name) == pytest.approx(published, abs=6e-4)
