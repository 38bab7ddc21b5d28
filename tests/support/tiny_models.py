"""Settings of small models that several test files train."""

from typing import Any

EXPERTS: dict[str, Any] = {
    "model.name": "mixtral",
    "model.num_layers": 2,
    "model.hidden_size": 32,
    "model.num_attention_heads": 4,
    "model.num_kv_heads": 2,
    "model.vocab_size": 259,
    "model.init_std": 0.06,
    "model.ffn_hidden_size": 24,
    "model.num_experts": 4,
}
"""A mixture of experts of two layers; one training step takes milliseconds."""
