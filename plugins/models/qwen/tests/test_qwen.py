"""Qwen keeps the contract of models, and its presets have the published sizes."""

from decoder_suites import FurtherDecoderSuite
from tiny_models import DECODER


class TestQwenOfExperts(FurtherDecoderSuite):
    """Qwen3-MoE, with an MLP in every second block."""

    plugin = "qwen"
    settings = {
        **DECODER,
        "model.num_experts": 4,
        "model.moe_ffn_hidden_size": 24,
        "model.feed_forward_types": ["mlp", "experts"],
    }
    layouts = ("ep2",)
    own_beside = {"num_dense_layers": {"feed_forward_types": None}}
    sizes = {
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
