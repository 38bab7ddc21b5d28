"""Settings of small models that several test files train: the tables of models.yaml."""

from pathlib import Path
from typing import Any

import yaml

TABLES: dict[str, dict[str, Any]] = yaml.safe_load(Path(__file__).with_name("models.yaml").read_text())


def of_model(fields: dict[str, Any]) -> dict[str, Any]:
    """Fields of the section 'model' as settings of a run."""
    return {f"model.{name}": value for name, value in fields.items()}


MIXTRAL, EXPERTS, DECODER, LATENT_EXPERTS = (
    of_model(TABLES[name]) for name in ("mixtral", "experts", "decoder", "latent experts")
)
NARROW_MIXTRAL: dict[str, Any] = {
    "model.name": "mixtral",
    "model.hidden_size": 32,
    "model.num_attention_heads": 4,
    "model.num_kv_heads": 2,
    "model.vocab_size": 259,
    "model.ffn_hidden_size": 32,
    "model.num_experts": 4,
    "model.init_std": 0.06,
}
"""Widths that 16 divides, as products in FP8 need them."""
