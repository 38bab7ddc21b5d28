"""Qwen keeps the contract of models, and its presets have the published sizes."""

import pytest
from decoder_suites import FurtherDecoderSuite
from tiny_models import DECODER


@pytest.mark.wide("families", tests=["test_a_layout_gives_the_run_of_one_process"])
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
    without_effect = {"published_scans": "only the names of published tensors depend on it"}
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
        "next-80b-a3b": 79.674,
        "3.5-0.8b": 0.752,
        "3.5-4b": 4.206,
        "3.5-9b": 8.954,
        "3.5-27b": 26.896,
        "3.5-35b-a3b": 34.661,
        "3.5-397b-a17b": 396.346,
    }


MIXED = {
    **DECODER,
    "model.num_layers": 2,
    "model.head_dim": 16,
    "model.rope_fraction": 0.25,
    "model.norm": "offset_rmsnorm",
    "model.attention_output_gate": True,
    "model.mixer_types": ["gated_delta", "attention"],
    "model.linear_num_key_heads": 2,
    "model.linear_key_head_dim": 6,
    "model.linear_value_head_dim": 8,
}


@pytest.mark.wide("families", tests=["test_a_layout_gives_the_run_of_one_process"])
class TestQwenNext(FurtherDecoderSuite):
    """Qwen3-Next: gated delta nets and gated attention, each with experts."""

    plugin = "qwen"
    settings = {
        **MIXED,
        "model.num_experts": 4,
        "model.moe_ffn_hidden_size": 24,
        "model.num_shared_experts": 1,
        "model.shared_expert_gate": True,
    }
    layouts = ("tp2",)
    own_beside = {"num_dense_layers": {"feed_forward_types": None}}
    checks_fields = False


@pytest.mark.wide("families", tests=["test_a_layout_gives_the_run_of_one_process"])
class TestQwenThreeFive(FurtherDecoderSuite):
    """A dense model of Qwen3.5, with its block of multi-token prediction."""

    plugin = "qwen"
    settings = {**MIXED, "model.published_scans": "apart", "model.num_mtp_layers": 1}
    layouts = ("cp2",)
    checks_fields = False
