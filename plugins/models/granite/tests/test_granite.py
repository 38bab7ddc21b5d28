"""Granite keeps the contract of models, and its presets have the published sizes."""

import pytest
from decoder_suites import FurtherDecoderSuite
from tiny_models import DECODER

FACTORS = {
    "model.embedding_multiplier": 6.0,
    "model.residual_multiplier": 0.5,
    "model.attention_scale": 0.25,
    "model.logits_divisor": 2.0,
}
WIDTHS = {
    "model.linear_num_key_heads": 2,
    "model.linear_num_value_heads": 4,
    "model.linear_key_head_dim": 6,
    "model.linear_value_head_dim": 8,
}
EXPERTS = {"model.num_experts": 4, "model.moe_ffn_hidden_size": 24, "model.num_shared_experts": 2}
ROTARY = ("rope_theta", "rope_scaling", "rope_fraction", "rope_interleaved")


@pytest.mark.wide("families", tests=["test_a_layout_gives_the_run_of_one_process"])
class TestGraniteHybrid(FurtherDecoderSuite):
    """Granite 4 with experts: Mamba-2 and attention without positions."""

    plugin = "granite"
    settings = {
        **DECODER,
        **FACTORS,
        **WIDTHS,
        **EXPERTS,
        "model.num_layers": 2,
        "model.mixer_types": ["mamba2", "attention"],
        "model.position_types": ["none"],
    }
    layouts = ("tp2", "cp2")
    positions = "ignored"
    own_beside = {
        **{name: {"feed_forward_types": ["mlp"]} for name in ("mlp_bias", "ffn_hidden_size")},
        "window_rope_theta": {"window": 4, "attention_types": ["full", "window"], "position_types": ["rotary"]},
        **{name: {"window": 4, "attention_types": ["full", "window"]} for name in ("window", "attention_types")},
        "num_dense_layers": {"feed_forward_types": None},
        **{name: {"position_types": ["rotary"]} for name in ROTARY},
        "mup_base": {"mixer_types": ["attention"]},
    }
    without_effect = {"published_as": "only the names of published tensors depend on it"}
    sizes = {
        "3.3-2b": 2.534,
        "3.3-8b": 8.171,
        "4-micro": 3.403,
        "4-h-micro": 3.191,
        "4-h-tiny": 6.939,
        "4-h-small": 32.207,
    }


@pytest.mark.wide("families", tests=["test_a_layout_gives_the_run_of_one_process"])
class TestGranite(FurtherDecoderSuite):
    """Granite 3: dense."""

    plugin = "granite"
    settings = {**DECODER, **FACTORS, "model.num_layers": 2}
    layouts = ("pp2",)
    checks_fields = False
