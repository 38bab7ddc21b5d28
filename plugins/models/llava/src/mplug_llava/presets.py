"""The published sizes, and a tiny model. A preset is a part of a run's config; the user's settings override it."""

from typing import Any

Preset = dict[str, dict[str, Any]]


def _published(size: str) -> Preset:
    """LLaVA-1.5 (arXiv 2310.03744): CLIP ViT-L/14 at 336 pixels, and Vicuna, a Llama 2 with 64 more tokens."""
    decoder = {"name": "llama", "preset": f"2-{size}", "vocab_size": 32064}
    return {"model": {"decoder": decoder}, "trainer": {"seq_length": 2048}, "optimizer": {"lr": 2e-5}}


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
PRESETS: dict[str, Preset] = {"tiny": TINY, "1.5-7b": _published("7b"), "1.5-13b": _published("13b")}
