"""Kimi Linear keeps the contract of models, and its preset has the published size."""

import pytest
from decoder_suites import FurtherDecoderSuite
from tiny_models import LATENT_EXPERTS


@pytest.mark.wide("families", tests=["test_a_layout_gives_the_run_of_one_process"])
class TestKimiLinear(FurtherDecoderSuite):
    plugin = "kimi-linear"
    settings = {
        **LATENT_EXPERTS,
        "model.num_mtp_layers": 0,
        "model.num_layers": 2,
        "model.mixer_types": ["kimi_delta", "attention"],
        "model.linear_key_head_dim": 6,
    }
    layouts = ("tp2",)
    positions = "ignored"
    own_examples = {
        **{name: [True] for name in ("qk_norm", "qkv_bias", "attention_out_bias", "attention_output_gate")},
        "num_kv_heads": [2],
        "head_dim": [8],
        "window_rope_theta": [100.0],
        "mixer_types": [["attention"]],
    }
    """Latent attention refuses most of these."""
    own_beside = {
        "window_rope_theta": {},
        **{name: {"window": 4, "attention_types": ["full", "window"]} for name in ("window", "attention_types")},
        "mup_base": {"mixer_types": ["attention"]},
        "linear_num_key_heads": {"mixer_types": ["gated_delta"], "linear_num_value_heads": 4},
        **{name: {"position_types": ["rotary"]} for name in ("rope_theta", "rope_scaling", "rope_interleaved")},
    }
    sizes = {"48b-a3b": 49.123}
