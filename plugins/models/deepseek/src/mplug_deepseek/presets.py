"""The published sizes. A preset is a part of a run's config; the user's settings override it."""

from typing import Any

Preset = dict[str, dict[str, Any]]


def _yarn(mscale: float) -> dict[str, Any]:
    """The scaling of rotary positions with which the models were released, for 163,840 tokens."""
    return {
        "type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": mscale,
        "mscale_all_dim": mscale,
    }


def _two(**model: Any) -> Preset:
    """DeepSeek-V2 (arXiv 2405.04434): softmax scores, gates as they are, no bias for balance."""
    common = {
        "num_dense_layers": 1,
        "num_experts_per_token": 6,
        "num_shared_experts": 2,
        "vocab_size": 102400,
        "moe_router_score": "softmax",
        "moe_router_normalize": False,
        "moe_router_group_best": 1,
        "aux_loss_coefficient": 1e-3,
        "expert_bias_rate": 0.0,
        "rope_scaling": _yarn(0.707),
    }
    return {"model": {**common, **model}, "trainer": {"seq_length": 4096}, "optimizer": {"lr": 2.4e-4}}


PRESETS: dict[str, Preset] = {
    "v2-lite": _two(
        hidden_size=2048,
        num_layers=27,
        num_attention_heads=16,
        q_lora_rank=None,
        ffn_hidden_size=10944,
        moe_ffn_hidden_size=1408,
        num_experts=64,
        moe_router_num_groups=1,
        moe_router_top_groups=1,
        moe_router_scale=1.0,
    ),
    "v2": _two(
        hidden_size=5120,
        num_layers=60,
        num_attention_heads=128,
        ffn_hidden_size=12288,
        moe_ffn_hidden_size=1536,
        num_experts=160,
        moe_router_num_groups=8,
        moe_router_top_groups=3,
        moe_router_scale=16.0,
    ),
    # arXiv 2412.19437; everything else is a default
    "v3": {
        "model": {"rope_scaling": _yarn(1.0)},
        "trainer": {"seq_length": 4096},
        "optimizer": {"lr": 2.2e-4},
    },
}
