"""The published sizes. A preset is a part of a run's config; the user's settings override it."""

from typing import Any

Preset = dict[str, dict[str, Any]]


def _sized(num_layers: int, num_experts: int) -> Preset:
    """arXiv 2508.10925, table 1; everything else is a default."""
    model = {"num_layers": num_layers, "num_experts": num_experts}
    return {"model": model, "trainer": {"seq_length": 4096}, "optimizer": {"lr": 3e-4}}


PRESETS: dict[str, Preset] = {"20b": _sized(24, 32), "120b": _sized(36, 128)}
