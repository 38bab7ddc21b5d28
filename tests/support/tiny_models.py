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
