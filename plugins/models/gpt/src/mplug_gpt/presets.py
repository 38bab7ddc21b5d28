"""Named sizes. A preset is a part of a run's config; the user's settings override it."""

from typing import Any

Preset = dict[str, dict[str, Any]]


def _scaling_study(hidden_size: int, num_layers: int, num_attention_heads: int) -> Preset:
    """A row of Megatron-Core's published H100 table: sequence 4096, vocabulary 131072, untied, MHA, 4h GELU."""
    model = {
        "hidden_size": hidden_size,
        "num_layers": num_layers,
        "num_attention_heads": num_attention_heads,
        "vocab_size": 131072,
    }
    return {"model": model, "trainer": {"seq_length": 4096}, "optimizer": {"lr": 1.5e-4}}


PRESETS: dict[str, Preset] = {
    "nano": {
        "model": {
            "hidden_size": 128,
            "num_layers": 4,
            "num_attention_heads": 4,
            "vocab_size": 256,
            "qk_norm": True,
            "init_std": 0.06,
            "max_position_embeddings": 256,
        },
    },
    # GPT-2 small (Radford et al. 2019)
    "125m": {
        "model": {
            "hidden_size": 768,
            "num_layers": 12,
            "num_attention_heads": 12,
            "vocab_size": 50257,
            "position": "learned",
            "activation": "gelu_tanh",
            "max_position_embeddings": 1024,
            "bias": True,
            "tie_embeddings": True,
        },
        "trainer": {"seq_length": 1024},
        "optimizer": {"lr": 6e-4},
    },
    # GPT-3 (arXiv 2005.14165, table 2.1)
    "175b": {
        "model": {
            "hidden_size": 12288,
            "num_layers": 96,
            "num_attention_heads": 96,
            "vocab_size": 50257,
            "position": "learned",
            "activation": "gelu_tanh",
            "max_position_embeddings": 2048,
            "bias": True,
            "tie_embeddings": True,
        },
        "trainer": {"seq_length": 2048},
        "optimizer": {"lr": 0.6e-4},
    },
    "1.7b": _scaling_study(2048, 24, 16),
    "7.1b": _scaling_study(4096, 30, 32),
    "16b": _scaling_study(6144, 32, 48),
    "32b": _scaling_study(7168, 48, 56),
    "70b": _scaling_study(8192, 84, 64),
    "177b": _scaling_study(12288, 96, 96),
    "462b": _scaling_study(18432, 112, 144),
}
