"""Named sizes. A preset is a part of a run's config; the user's settings override it."""

from typing import Any

Preset = dict[str, dict[str, Any]]


def _preset(model: dict[str, Any], lr: float) -> Preset:
    return {"model": model, "trainer": {"seq_length": 512}, "optimizer": {"lr": lr}}


_TINY = {"num_layers": 2, "hidden_size": 128, "num_attention_heads": 2, "vocab_size": 259}
_LARGE = {"num_layers": 24, "hidden_size": 1024, "num_attention_heads": 16, "ffn_hidden_size": 4096}
_DROPOUT = {"dropout": 0.1, "attention_dropout": 0.1}
_ROBERTA = {
    "vocab_size": 50265,
    "max_position_embeddings": 514,
    "position_offset": 2,
    "num_token_types": 1,
    "norm_eps": 1e-5,
}
BERT: dict[str, Preset] = {
    "tiny": {"model": {**_TINY, "ffn_hidden_size": 512}},
    # arXiv 1810.04805, section 3 and appendix A.2; the vocabularies are those of the uncased English models
    "base": _preset(_DROPOUT, 1e-4),
    "large": _preset({**_LARGE, **_DROPOUT}, 1e-4),
    # arXiv 1907.11692, table 9
    "roberta-base": _preset({**_ROBERTA, **_DROPOUT}, 6e-4),
    "roberta-large": _preset({**_LARGE, **_ROBERTA, **_DROPOUT}, 4e-4),
}
MODERN_BERT: dict[str, Preset] = {
    "tiny": {"model": {**_TINY, "num_layers": 3, "ffn_hidden_size": 192, "window": 16}},
    # arXiv 2412.13663, tables 3 and 4
    "base": {"model": {}, "trainer": {"seq_length": 1024}, "optimizer": {"lr": 8e-4}},
    "large": {
        "model": {"num_layers": 28, "hidden_size": 1024, "num_attention_heads": 16, "ffn_hidden_size": 2624},
        "trainer": {"seq_length": 1024},
        "optimizer": {"lr": 5e-4},
    },
}
