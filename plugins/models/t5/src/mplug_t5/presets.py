"""The published sizes of T5 (arXiv 1910.10683, section 3.7) and T5 v1.1."""

from typing import Any

Preset = dict[str, dict[str, Any]]


def _size(layers: int, width: int, heads: int, ffn: int, head: int = 64) -> dict[str, int]:
    return {
        "num_layers": layers,
        "hidden_size": width,
        "num_attention_heads": heads,
        "ffn_hidden_size": ffn,
        "head_dim": head,
    }


_FIRST = {"activation": "relu", "tie_embeddings": True}
_TRAINER = {"trainer": {"seq_length": 114}}
PRESETS: dict[str, Preset] = {
    "tiny": {
        "model": {**_size(2, 64, 2, 128, 32), "vocab_size": 512, "bias_reach": 32, "encoder_length": 64},
    },
    "small": {"model": {**_size(6, 512, 8, 2048), **_FIRST}, **_TRAINER},
    "base": {"model": {**_size(12, 768, 12, 3072), **_FIRST}, **_TRAINER},
    "large": {"model": {**_size(24, 1024, 16, 4096), **_FIRST}, **_TRAINER},
    "3b": {"model": {**_size(24, 1024, 32, 16384, 128), **_FIRST}, **_TRAINER},
    "11b": {"model": {**_size(24, 1024, 128, 65536, 128), **_FIRST}, **_TRAINER},
    "v1.1-small": {"model": _size(8, 512, 6, 1024), **_TRAINER},
    "v1.1-base": {"model": _size(12, 768, 12, 2048), **_TRAINER},
    "v1.1-large": {"model": _size(24, 1024, 16, 2816), **_TRAINER},
    "v1.1-xl": {"model": _size(24, 2048, 32, 5120), **_TRAINER},
    "v1.1-xxl": {"model": _size(24, 4096, 64, 10240), **_TRAINER},
}
