"""Tiny decoders whose blocks have scans, or scans and attention."""

from typing import Any

from tiny_models import DECODER

HEADS = {"model.linear_num_key_heads": 2, "model.linear_key_head_dim": 6, "model.linear_value_head_dim": 8}
LLAMA: dict[str, Any] = {**DECODER, "model.name": "llama", "model.num_layers": 2, "data.documents": 5}
HYBRID = {**LLAMA, **HEADS, "model.mixer_types": ["gated_delta", "attention"]}
SCANS = {**LLAMA, **HEADS, "model.num_layers": 4, "model.linear_num_key_heads": 4}
SCANS["model.mixer_types"] = ["mamba2", "kimi_delta", "gated_linear", "gated_delta"]
