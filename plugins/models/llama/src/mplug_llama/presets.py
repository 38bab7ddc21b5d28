"""The published sizes. A preset is a part of a run's config; the user's settings override it."""

from typing import Any

Preset = dict[str, dict[str, Any]]


def _model(hidden: int, layers: int, heads: int, kv_heads: int, ffn: int, **more: Any) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "num_layers": layers,
        "num_attention_heads": heads,
        "num_kv_heads": kv_heads,
        "ffn_hidden_size": ffn,
        **more,
    }


def _two(*shape: int) -> Preset:
    """Llama 2 (arXiv 2307.09288)."""
    model = _model(*shape, vocab_size=32000, rope_theta=1e4)
    return {"model": model, "trainer": {"seq_length": 4096}, "optimizer": {"lr": 3e-4}}


def _three(*shape: int) -> Preset:
    """Llama 3 (arXiv 2407.21783, table 3)."""
    model = _model(*shape, vocab_size=128256, rope_theta=5e5)
    return {"model": model, "trainer": {"seq_length": 8192}, "optimizer": {"lr": 3e-4}}


def _long(*shape: int, factor: float = 8.0, tied: bool = False) -> Preset:
    """Llama 3.1 and later: rotary frequencies for sequences of 131,072 tokens."""
    preset = _three(*shape)
    preset["model"] |= {
        "tie_embeddings": tied,
        "rope_scaling": {
            "type": "llama3",
            "factor": factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    }
    return preset


PRESETS: dict[str, Preset] = {
    "2-7b": _two(4096, 32, 32, 32, 11008),
    "2-13b": _two(5120, 40, 40, 40, 13824),
    "2-70b": _two(8192, 80, 64, 8, 28672),
    "3-8b": _three(4096, 32, 32, 8, 14336),
    "3-70b": _three(8192, 80, 64, 8, 28672),
    "3.1-8b": _long(4096, 32, 32, 8, 14336),
    "3.1-70b": _long(8192, 80, 64, 8, 28672),
    "3.1-405b": _long(16384, 126, 128, 8, 53248),
    "3.2-1b": _long(2048, 16, 32, 8, 8192, factor=32.0, tied=True),
    "3.2-3b": _long(3072, 28, 24, 8, 8192, factor=32.0, tied=True),
}
