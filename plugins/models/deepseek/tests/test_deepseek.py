"""DeepSeek keeps the contract of models, and its presets have the published sizes."""

from typing import Any

import pytest
from decoder_fields import examples_of, of_a_family
from library_reference import library_logits
from mplug_deepseek import Deepseek
from tiny_models import billions
from torch import Tensor

from mplug.testing import ModelSuite

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
        "model.num_layers": 3,
        "model.hidden_size": 32,
        "model.num_attention_heads": 4,
        "model.ffn_hidden_size": 48,
        "model.vocab_size": 259,
        "model.rope_theta": 1e4,
        "model.init_std": 0.06,
        "model.num_dense_layers": 1,
        "model.q_lora_rank": 12,
        "model.kv_lora_rank": 12,
        "model.qk_nope_head_dim": 8,
        "model.qk_rope_head_dim": 4,
        "model.v_head_dim": 6,
        "model.moe_ffn_hidden_size": 16,
        "model.num_experts": 8,
        "model.num_experts_per_token": 3,
        "model.moe_router_num_groups": 4,
        "model.moe_router_top_groups": 2,
        "model.expert_bias_rate": 0.01,
        "model.num_mtp_layers": 2,
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


@pytest.mark.wide("layouts")
class TestDeepseekUnderLayouts(TestDeepseek):
    checks_fields = False
    layouts = (
        "cp2",
        "tp2",
        "pp2",
        "pp2 parallel.pp.schedule=zb-v",
        "cp2 parallel.cp.method=ulysses",
        "tp2pp2",
        "zero2",
        "fsdp2",
        "ep2",
        "tp2ep2",
        "tp2ep2 parallel.tp.sequence_parallel=false",
        "etp2",
    )


SIZES = {
    "v2-lite": 15.706,
    "v2": 235.741,
    "v3": 671.026,
}


@pytest.mark.parametrize(("name", "published"), SIZES.items())
def test_a_preset_has_its_published_parameters(name: str, published: float) -> None:
    assert set(SIZES) == set(Deepseek.presets)
    assert billions(Deepseek, name) == pytest.approx(published, abs=6e-4)
