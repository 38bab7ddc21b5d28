"""The published sizes, and a tiny model. A preset is a part of a run's config; the user's settings override it."""

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
    return {"model": model, "trainer": {"seq_length": 4096}, "optimizer": {"lr": 1e-5}}


def _second(*shape: int, vision_ffn: int = 3420, vocab_size: int = 152064, tied: bool = False) -> Preset:
    """Qwen2.5-VL (arXiv 2502.13923): a tower with windows, times of videos as positions."""
    vision = {
        "num_layers": 32,
        "hidden_size": 1280,
        "ffn_hidden_size": vision_ffn,
        "activation": "swiglu",
        "norm": "rmsnorm",
        "norm_bias": False,
        "patch_size": 14,
        "patch_bias": False,
        "position_grid": None,
        "window_size": 112,
        "full_attention_blocks": [7, 15, 23, 31],
        "deepstack_blocks": [],
        "tokens_per_second": 2,
    }
    return _preset(
        *shape,
        vocab_size=vocab_size,
        tie_embeddings=tied,
        qkv_bias=True,
        qk_norm=False,
        rope_theta=1e6,
        rope_division="contiguous",
        rope_sections=[16, 24, 24],
        vision=vision,
    )


SMALL = {"num_layers": 24, "hidden_size": 1024, "ffn_hidden_size": 4096, "deepstack_blocks": [5, 11, 17]}
"""The tower of the two smallest of Qwen3-VL; the others have the default one."""


def _third(*shape: int, tied: bool = False, vision: dict[str, Any] | None = None, **more: Any) -> Preset:
    """Qwen3-VL (arXiv 2511.21631): learned positions of patches, DeepStack, time in the text."""
    return _preset(
        *shape,
        head_dim=128,
        tie_embeddings=tied,
        rope_division="alternating",
        rope_sections=[24, 20, 20],
        vision=vision or {},
        **more,
    )


def _sparse(*shape: int, expert: int) -> Preset:
    """Qwen3-VL-MoE: experts in every block of the decoder."""
    return _third(*shape, num_experts=128, num_experts_per_token=8, moe_ffn_hidden_size=expert)


TINY: Preset = {
    "model": {
        "hidden_size": 128,
        "num_layers": 4,
        "num_attention_heads": 4,
        "num_kv_heads": 2,
        "ffn_hidden_size": 256,
        "vocab_size": 512,
        "rope_theta": 1e4,
        "rope_division": "alternating",
        "rope_sections": [6, 5, 5],
        "vision": {
            "num_layers": 3,
            "hidden_size": 64,
            "num_attention_heads": 4,
            "ffn_hidden_size": 128,
            "patch_size": 8,
            "position_grid": 8,
            "deepstack_blocks": [0, 1],
            "min_pixels": 1024,
            "max_pixels": 16384,
            "image_token": 503,
            "video_token": 504,
            "start_token": 500,
            "end_token": 501,
        },
    },
    "trainer": {"seq_length": 256},
}
"""A model for a CPU, with the parts of Qwen3-VL."""
# The number of parameters of each is that of the released weights, to the last one; only that of 2.5-72b is unchecked.
PRESETS: dict[str, Preset] = {
    "tiny": TINY,
    "2.5-3b": _second(2048, 36, 16, 2, 11008, vocab_size=151936, tied=True),
    "2.5-7b": _second(3584, 28, 28, 4, 18944),
    "2.5-72b": _second(8192, 80, 64, 8, 29568, vision_ffn=3456),
    "3-2b": _third(2048, 28, 16, 8, 6144, tied=True, vision=SMALL),
    "3-4b": _third(2560, 36, 32, 8, 9728, tied=True, vision=SMALL),
    "3-8b": _third(4096, 36, 32, 8, 12288),
    "3-32b": _third(5120, 64, 64, 8, 25600),
    "3-30b-a3b": _sparse(2048, 48, 32, 4, 6144, expert=768),
    "3-235b-a22b": _sparse(4096, 94, 64, 4, 12288, expert=1536),
}
