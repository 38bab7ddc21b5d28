"""The published sizes. A preset is a part of a run's config; the user's settings override it."""

from typing import Any

Preset = dict[str, dict[str, Any]]


def _preset(hidden: int, heads: int, kv_heads: int, ffn: int, logits: float, score: float, **more: Any) -> Preset:
    """40 blocks. `logits` divides the logits, and `score` multiplies attention scores."""
    model = {
        "hidden_size": hidden,
        "num_layers": 40,
        "num_attention_heads": heads,
        "num_kv_heads": kv_heads,
        "ffn_hidden_size": ffn,
        "tie_embeddings": True,
        "embedding_multiplier": 12.0,
        "residual_multiplier": 0.22,
        "attention_scale": score,
        "logits_divisor": logits,
        **more,
    }
    return {"model": model, "trainer": {"seq_length": 4096}, "optimizer": {"lr": 3e-4}}


def _three(*shape: float, vocab_size: int) -> Preset:
    """Granite 3.3."""
    hidden, heads, kv_heads, ffn = map(int, shape[:4])
    return _preset(hidden, heads, kv_heads, ffn, *shape[4:], vocab_size=vocab_size, rope_theta=1e7)


def _four(*shape: float, **more: Any) -> Preset:
    """Granite 4."""
    hidden, heads, kv_heads, ffn = map(int, shape[:4])
    own = {"vocab_size": 100352, "published_as": "granitemoehybrid", **more}
    return _preset(hidden, heads, kv_heads, ffn, *shape[4:], **own)


def _hybrid(*shape: float, heads: int, **more: Any) -> Preset:
    """Granite 4 with Mamba-2 in nine of ten blocks, and attention without positions in the others."""
    return _four(
        *shape,
        mixer_types=["mamba2"] * 5 + ["attention"] + ["mamba2"] * 4,
        position_types=["none"],
        linear_num_key_heads=1,
        linear_num_value_heads=heads,
        linear_key_head_dim=128,
        linear_value_head_dim=64,
        **more,
    )


def _experts(experts: int, chosen: int) -> dict[str, Any]:
    """Experts in every block, and a shared MLP of twice the width."""
    return {"num_experts": experts, "num_experts_per_token": chosen, "num_shared_experts": 2}


PRESETS: dict[str, Preset] = {
    "3.3-2b": _three(2048, 32, 8, 8192, 8.0, 1 / 64, vocab_size=49159),
    "3.3-8b": _three(4096, 32, 8, 12800, 16.0, 1 / 128, vocab_size=49159),
    "4-micro": _four(2560, 40, 8, 8192, 10.0, 1 / 64, rope_theta=1e7),
    "4-h-micro": _hybrid(2048, 32, 8, 8192, 8.0, 1 / 64, heads=64),
    "4-h-tiny": _hybrid(1536, 12, 4, 512, 6.0, 1 / 128, heads=48, **_experts(64, 6)),
    "4-h-small": _hybrid(4096, 32, 8, 768, 16.0, 1 / 128, heads=128, **_experts(72, 10)),
}
