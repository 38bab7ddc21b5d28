"""The published sizes. A preset is a part of a run's config; the user's settings override it."""

from typing import Any

Preset = dict[str, dict[str, Any]]


def _preset(hidden: int, layers: int, heads: int, kv_heads: int, ffn: int, **more: Any) -> Preset:
    model = {
        "hidden_size": hidden,
        "num_layers": layers,
        "num_attention_heads": heads,
        "num_kv_heads": kv_heads,
        "ffn_hidden_size": ffn,
        **more,
    }
    return {"model": model, "trainer": {"seq_length": 4096}, "optimizer": {"lr": 3e-4}}


def _two(*shape: int, vocab_size: int = 152064, tied: bool = False) -> Preset:
    """Qwen2.5 (arXiv 2412.15115)."""
    return _preset(*shape, vocab_size=vocab_size, tie_embeddings=tied, qkv_bias=True, qk_norm=False)


def _three(*shape: int, tied: bool = False, **more: Any) -> Preset:
    """Qwen3 (arXiv 2505.09388)."""
    return _preset(*shape, head_dim=128, vocab_size=151936, tie_embeddings=tied, qk_norm=True, **more)


def _sparse(*shape: int, expert: int) -> Preset:
    """Qwen3-MoE (arXiv 2505.09388): experts in every block."""
    return _three(*shape, num_experts=128, num_experts_per_token=8, moe_ffn_hidden_size=expert)


def _mixed(*shape: int, layers: int, vocab_size: int, **more: Any) -> Preset:
    """Qwen3-Next and 3.5: rotary positions turn a quarter of a head, and every fourth block has attention."""
    hidden, heads, kv_heads, ffn, value_heads = shape
    return _preset(
        *(hidden, layers, heads, kv_heads, ffn),
        head_dim=256,
        vocab_size=vocab_size,
        rope_theta=1e7,
        rope_fraction=0.25,
        norm="offset_rmsnorm",
        attention_output_gate=True,
        mixer_types=["gated_delta", "gated_delta", "gated_delta", "attention"],
        linear_num_key_heads=16,
        linear_num_value_heads=value_heads,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        **more,
    )


def _shared(experts: int, chosen: int, width: int) -> dict[str, Any]:
    """Experts in every block, and one of their width with a gate that every token uses."""
    return {
        "num_experts": experts,
        "num_experts_per_token": chosen,
        "moe_ffn_hidden_size": width,
        "num_shared_experts": 1,
        "shared_expert_gate": True,
    }


def _three_five(*shape: int, layers: int, tied: bool = False, **more: Any) -> Preset:
    """The decoders of Qwen3.5."""
    own = {"tie_embeddings": tied, "published_scans": "apart", **more}
    return _mixed(*shape, layers=layers, vocab_size=248320, **own)


PRESETS: dict[str, Preset] = {
    "2.5-0.5b": _two(896, 24, 14, 2, 4864, vocab_size=151936, tied=True),
    "2.5-1.5b": _two(1536, 28, 12, 2, 8960, vocab_size=151936, tied=True),
    "2.5-3b": _two(2048, 36, 16, 2, 11008, vocab_size=151936, tied=True),
    "2.5-7b": _two(3584, 28, 28, 4, 18944),
    "2.5-14b": _two(5120, 48, 40, 8, 13824),
    "2.5-32b": _two(5120, 64, 40, 8, 27648),
    "2.5-72b": _two(8192, 80, 64, 8, 29568),
    "3-0.6b": _three(1024, 28, 16, 8, 3072, tied=True),
    "3-1.7b": _three(2048, 28, 16, 8, 6144, tied=True),
    "3-4b": _three(2560, 36, 32, 8, 9728, tied=True),
    "3-8b": _three(4096, 36, 32, 8, 12288),
    "3-14b": _three(5120, 40, 40, 8, 17408),
    "3-32b": _three(5120, 64, 64, 8, 25600),
    "3-30b-a3b": _sparse(2048, 48, 32, 4, 6144, expert=768),
    "3-235b-a22b": _sparse(4096, 94, 64, 4, 12288, expert=1536),
    "next-80b-a3b": _mixed(2048, 16, 2, 5120, 32, layers=48, vocab_size=151936, **_shared(512, 10, 512)),
    "3.5-0.8b": _three_five(1024, 8, 2, 3584, 16, layers=24, tied=True),
    "3.5-4b": _three_five(2560, 16, 4, 9216, 32, layers=32, tied=True),
    "3.5-9b": _three_five(4096, 16, 4, 12288, 32, layers=32),
    "3.5-27b": _three_five(5120, 24, 4, 17408, 48, layers=64),
    "3.5-35b-a3b": _three_five(2048, 16, 2, 5632, 32, layers=40, **_shared(256, 8, 512)),
    "3.5-397b-a17b": _three_five(4096, 32, 2, 12288, 64, layers=60, **_shared(512, 10, 1024)),
}
