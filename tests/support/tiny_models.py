"""Settings of small models that several test files train."""

from typing import Any

MIXTRAL: dict[str, Any] = {
    "model.name": "mixtral",
    "model.num_layers": 2,
    "model.hidden_size": 32,
    "model.num_attention_heads": 4,
    "model.num_kv_heads": 2,
    "model.vocab_size": 259,
    "model.ffn_hidden_size": 32,
    "model.num_experts": 4,
}
"""A mixture of experts of two layers; one training step takes milliseconds."""

EXPERTS: dict[str, Any] = {**MIXTRAL, "model.init_std": 0.06, "model.ffn_hidden_size": 24}
"""The same with other widths of the experts, and larger weights."""

DECODER: dict[str, Any] = {
    "model.num_layers": 3,
    "model.hidden_size": 32,
    "model.num_attention_heads": 4,
    "model.num_kv_heads": 2,
    "model.ffn_hidden_size": 48,
    "model.vocab_size": 259,
    "model.rope_theta": 1e4,
    "model.init_std": 0.06,
}
"""A decoder of a family with grouped heads and rotary positions, without its name."""


LATENT_EXPERTS: dict[str, Any] = {
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
    "model.num_mtp_layers": 2,
}
"""A decoder with latent attention, groups of experts and multi-token prediction, without its name and its layers."""
