"""The published sizes, and a tiny model. A preset is a part of a run's config; the user's settings override it."""

from typing import Any

Preset = dict[str, dict[str, Any]]


def _published(size: str) -> Preset:
    """LLaVA-1.5 (arXiv 2310.03744): CLIP ViT-L/14 at 336 pixels, and Vicuna, a Llama 2 with 64 more tokens."""
    decoder = {"name": "llama", "preset": f"2-{size}", "vocab_size": 32064}
    return {"model": {"decoder": decoder}, "trainer": {"seq_length": 2048}, "optimizer": {"lr": 2e-5}}


def _one_vision(size: str, vocab_size: int) -> Preset:
    """LLaVA-OneVision (arXiv 2408.03326): SigLIP SO400M at 384 pixels without its last block, tiles, and Qwen2."""
    decoder = {"name": "qwen", "preset": f"2.5-{size}", "vocab_size": vocab_size}
    vision = {
        "num_layers": 26,
        "feature_layer": -1,
        "hidden_size": 1152,
        "num_attention_heads": 16,
        "ffn_hidden_size": 4304,
        "activation": "gelu_tanh",
        "norm_eps": 1e-6,
        "image_size": 384,
        "patch_size": 14,
        "class_row": False,
        "patch_bias": True,
        "norm_before": False,
        "fit": "stretch",
        "pixel_mean": (0.5, 0.5, 0.5),
        "pixel_std": (0.5, 0.5, 0.5),
        "typical_pictures": 5,
    }
    return {
        "model": {"decoder": decoder, "vision": vision, "image_token": 151646, "tiling": {}},
        "trainer": {"seq_length": 8192},
        "optimizer": {"lr": 1e-5},
    }


TINY: Preset = {
    "model": {
        "decoder": {
            "name": "llama",
            "hidden_size": 128,
            "num_layers": 4,
            "num_attention_heads": 4,
            "num_kv_heads": 2,
            "ffn_hidden_size": 256,
            "vocab_size": 512,
        },
        "vision": {
            "num_layers": 3,
            "hidden_size": 64,
            "num_attention_heads": 4,
            "ffn_hidden_size": 128,
            "image_size": 32,
            "patch_size": 8,
        },
        "image_token": 503,
    },
    "trainer": {"seq_length": 256},
}
"""A model for a CPU."""
PRESETS: dict[str, Preset] = {
    "tiny": TINY,
    "1.5-7b": _published("7b"),
    "1.5-13b": _published("13b"),
    "onevision-0.5b": _one_vision("0.5b", 152000),
    "onevision-7b": _one_vision("7b", 152064),
}
