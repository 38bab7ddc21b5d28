"""Named sizes. A preset is a part of a run's config; whatever the user says goes over it."""

from typing import Any

Preset = dict[str, dict[str, Any]]


def _palm(num_layers: int, num_attention_heads: int, hidden_size: int) -> Preset:
    """A size of PaLM (arXiv 2204.02311, table 1): heads of 256, an MLP of 4 times the width, 256,000 tokens, tied."""
    model = {
        "num_layers": num_layers,
        "num_attention_heads": num_attention_heads,
        "hidden_size": hidden_size,
        "head_dim": 256,
        "ffn_hidden_size": 4 * hidden_size,
        "vocab_size": 256000,
    }
    return {"model": model, "trainer": {"seq_length": 2048}}


PRESETS: dict[str, Preset] = {
    "nano": {
        "model": {
            "num_layers": 4,
            "num_attention_heads": 4,
            "num_kv_heads": 2,
            "hidden_size": 128,
            "head_dim": 32,
            "ffn_hidden_size": 256,
            "vocab_size": 256,
            "qk_norm": True,
            "init_std": 0.06,
        },
    },
    "8b": _palm(32, 16, 4096),
    "62b": _palm(64, 32, 8192),
    "540b": _palm(118, 48, 18432),
}
