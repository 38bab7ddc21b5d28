"""gpt-oss keeps the contract of models, and its presets have the published sizes."""

from typing import Any

import pytest
from decoder_fields import examples_of, of_a_family
from library_reference import library_logits
from mplug_gpt_oss import GptOss
from tiny_models import DECODER, billions
from torch import Tensor

from mplug_testing import ModelSuite

WIDE = pytest.mark.wide("suites")
"""The suites of llama and deepseek test the fields that all decoders share in the quick set."""


class TestGptOss(ModelSuite):
    plugin = "gpt-oss"
    settings = {
        "kernels.attention": None,
        **DECODER,
        "model.head_dim": 16,
        "model.window": 4,
        "model.num_experts": 4,
        "model.num_experts_per_token": 2,
        "model.rope_scaling": {
            "type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 16,
            "truncate": False,
        },
    }
    layouts = ("tp2ep2",)
    positions = "relative"
    examples = examples_of(GptOss.Config.model_fields)
    beside = of_a_family(GptOss.Config.model_fields)

    def reference(self, weights: Any, batch: Any, config: Any) -> Tensor:
        return library_logits(self, weights, batch["tokens"])

    @WIDE
    def test_every_field_of_its_config_has_an_effect(self) -> None:
        super().test_every_field_of_its_config_has_an_effect()


SIZES = {
    "20b": 20.915,
    "120b": 116.829,
}


@pytest.mark.parametrize(("name", "published"), SIZES.items())
def test_a_preset_has_its_published_parameters(name: str, published: float) -> None:
    assert set(SIZES) == set(GptOss.presets)
    assert billions(GptOss, name) == pytest.approx(published, abs=6e-4)
