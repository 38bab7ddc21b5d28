"""DeepSeek keeps the contract of models, and its presets have the published sizes."""

from typing import Any

import pytest
from decoder_fields import examples_of, of_a_family
from library_reference import library_logits
from mplug_deepseek import Deepseek
from tiny_models import LATENT_EXPERTS, billions
from torch import Tensor

from mplug_testing import ModelSuite

REFUSED_BY_LATENT_ATTENTION: dict[str, list[Any]] = {
    "num_kv_heads": [2],
    "head_dim": [8],
    "qk_norm": [True],
    "qkv_bias": [True],
    "attention_out_bias": [True],
    "window_rope_theta": [100.0],
}


class TestDeepseek(ModelSuite):
    plugin = "deepseek"
    settings = {
        **LATENT_EXPERTS,
        "model.num_layers": 3,
        "model.expert_bias_rate": 0.01,
        "model.rope_scaling": {
            "type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 16,
            "mscale": 0.7,
            "mscale_all_dim": 0.9,
        },
    }
    layouts = ("tp2pp2", "cp2")
    positions = "relative"
    examples = examples_of(Deepseek.Config.model_fields, REFUSED_BY_LATENT_ATTENTION)
    beside = of_a_family(Deepseek.Config.model_fields, {"window_rope_theta": {}})

    def reference(self, weights: Any, batch: Any, config: Any) -> Tensor:
        return library_logits(self, weights, batch["tokens"])


SIZES = {
    "v2-lite": 15.706,
    "v2": 235.741,
    "v3": 671.026,
}


@pytest.mark.parametrize(("name", "published"), SIZES.items())
def test_a_preset_has_its_published_parameters(name: str, published: float) -> None:
    assert set(SIZES) == set(Deepseek.presets)
    assert billions(Deepseek, name) == pytest.approx(published, abs=6e-4)
