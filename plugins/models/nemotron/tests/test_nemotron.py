"""Nemotron keeps the contract of models, and its presets have the published sizes."""

import pytest
from decoder_suites import BESIDE, FurtherDecoderSuite
from tiny_models import DECODER

SHAPE = {name: value for name, value in DECODER.items() if name != "model.num_layers"}


OF_TWO_PARTS = ("mixer_types", "feed_forward_types", "num_dense_layers", "post_norms")
"""Fields that blocks of one part refuse."""


@pytest.mark.wide("families", tests=["test_a_layout_gives_the_run_of_one_process"])
class TestNemotron(FurtherDecoderSuite):
    """Every kind of block, and a depth of multi-token prediction."""

    plugin = "nemotron"
    settings = {
        **SHAPE,
        "model.num_layers": 4,
        "model.pattern": "MEM*",
        "model.num_mtp_layers": 1,
        "model.num_experts": 4,
        "model.num_experts_per_token": 2,
        "model.moe_ffn_hidden_size": 24,
        "model.moe_latent_size": 12,
        "model.num_shared_experts": 1,
        "model.linear_num_key_heads": 2,
        "model.linear_key_head_dim": 6,
        "model.linear_value_head_dim": 8,
    }
    layouts = ("tp2",)
    positions = "ignored"
    own_beside = {
        **{name: {n: v for n, v in one.items() if n not in OF_TWO_PARTS} for name, one in BESIDE.items()},
        **{name: {} for name in OF_TWO_PARTS},
        "window_rope_theta": {"window": 4, "attention_types": ["full", "window"], "position_types": ["rotary"]},
        **{name: {"window": 4, "attention_types": ["full", "window"]} for name in ("window", "attention_types")},
        "mtp_pattern": {"num_mtp_layers": 1},
        "ffn_hidden_size": {"pattern": "M-*"},
        "mlp_bias": {"pattern": "M-*"},
        **{name: {"position_types": ["rotary"]} for name in ("rope_theta", "rope_scaling", "rope_fraction")},
        "rope_interleaved": {"position_types": ["rotary"]},
    }
    own_examples = {
        "pattern": ["M*"],
        "mtp_pattern": ["*-"],
        "mixer_types": [["gated_delta"]],
        "feed_forward_types": [["experts"]],
        "num_dense_layers": [1],
        "post_norms": [True],
    }
    without_effect = {"mup_base": "blocks of one branch refuse it"}
    sizes = {"h-8b": 8.101, "3-nano-30b-a3b": 31.578}
