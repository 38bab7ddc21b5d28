"""The published sizes. A preset is a part of a run's config; the user's settings override it."""

from typing import Any

Preset = dict[str, dict[str, Any]]
SHAPE = ("hidden_size", "num_layers", "num_attention_heads", "num_kv_heads", "head_dim", "ffn_hidden_size")


def _two(*shape: int, scalar: int) -> Preset:
    """Gemma 2 (arXiv 2408.00118): windows in every second block, soft caps."""
    model = {
        **dict(zip(SHAPE, shape, strict=True)),
        "vocab_size": 256000,
        "attention_scale": scalar**-0.5,
        "attention_soft_cap": 50.0,
        "logit_soft_cap": 30.0,
        "window": 4096,
        "attention_types": ["window", "full"],
    }
    return {"model": model, "trainer": {"seq_length": 8192}, "optimizer": {"lr": 3e-4}}


def _three(
    *shape: int, scalar: int = 256, window: int = 1024, vocab_size: int = 262208, stretch: bool = True
) -> Preset:
    """Gemma 3 (arXiv 2503.19786): five blocks with windows before each block without, QK-norm."""
    model: dict[str, Any] = {
        **dict(zip(SHAPE, shape, strict=True)),
        "vocab_size": vocab_size,
        "qk_norm": True,
        "attention_scale": scalar**-0.5,
        "window": window,
        "attention_types": [*["window"] * 5, "full"],
        "rope_theta": 1e6,
        "window_rope_theta": 1e4,
        "rope_scaling": {"type": "linear", "factor": 8.0} if stretch else None,
    }
    return {"model": model, "trainer": {"seq_length": 8192}, "optimizer": {"lr": 3e-4}}


def _seeing(preset: Preset) -> Preset:
    """A decoder with the tower of Gemma 3."""
    return {**preset, "model": {**preset["model"], "vision": {}}, "optimizer": {"lr": 1e-5}}


TINY: Preset = {
    "model": {
        **dict(zip(SHAPE, (128, 6, 4, 2, 32, 256), strict=True)),
        "vocab_size": 512,
        "qk_norm": True,
        "window": 32,
        "attention_types": [*["window"] * 5, "full"],
        "window_rope_theta": 1e4,
        "rope_theta": 1e6,
        "vision": {
            "num_layers": 3,
            "hidden_size": 64,
            "num_attention_heads": 4,
            "ffn_hidden_size": 128,
            "image_size": 64,
            "patch_size": 8,
            "tokens_per_image": 16,
            "image_token": 503,
            "start_token": 500,
            "end_token": 501,
            "blank_line_token": 502,
        },
    },
    "trainer": {"seq_length": 256},
}
"""A model for a CPU that sees."""
PRESETS: dict[str, Preset] = {
    "2-2b": _two(2304, 26, 8, 4, 256, 9216, scalar=256),
    "2-9b": _two(3584, 42, 16, 8, 256, 14336, scalar=256),
    "2-27b": _two(4608, 46, 32, 16, 128, 36864, scalar=144),
    "3-270m": _three(640, 18, 4, 1, 256, 2048, window=512, vocab_size=262144, stretch=False),
    "3-1b": _three(1152, 26, 4, 1, 256, 6912, window=512, vocab_size=262144, stretch=False),
    "3-4b": _three(2560, 34, 8, 4, 256, 10240),
    "3-12b": _three(3840, 48, 16, 8, 256, 15360),
    "3-27b": _three(5376, 62, 32, 16, 128, 21504, scalar=168),
}
PRESETS |= {f"{name}-vision": _seeing(PRESETS[name]) for name in ("3-4b", "3-12b", "3-27b")}
PRESETS["tiny-vision"] = TINY
