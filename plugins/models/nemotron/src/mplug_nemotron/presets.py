"""The published sizes. A preset is a part of a run's config; the user's settings override it."""

from typing import Any

Preset = dict[str, dict[str, Any]]


def _preset(pattern: str, *shape: int, mamba_heads: int, **more: Any) -> Preset:
    hidden, heads, kv_heads, ffn = shape
    model = {
        "pattern": pattern,
        "num_layers": len(pattern),
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": 128,
        "ffn_hidden_size": ffn,
        "linear_num_value_heads": mamba_heads,
        "linear_num_key_heads": 8,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 64,
        **more,
    }
    return {"model": model, "trainer": {"seq_length": 8192}, "optimizer": {"lr": 3e-4}}


PRESETS: dict[str, Preset] = {
    # Nemotron-H (arXiv 2504.03624)
    "h-8b": _preset("M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-", 4096, 32, 8, 21504, mamba_heads=128),
    # Nemotron 3 Nano
    "3-nano-30b-a3b": _preset(
        "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
        *(2688, 32, 2, 1856),
        mamba_heads=64,
        num_experts=128,
        num_experts_per_token=6,
        num_shared_experts=2,
        moe_router_scale=2.5,
    ),
}
