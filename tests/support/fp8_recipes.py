"""Settings of runs in FP8, and the recipes as settings."""

from typing import Any

NAMED: dict[str, Any] = {"kernels.linear": "fp8", "model.num_layers": 3}
DELAYED = {"precisions.fp8.when": "delayed", "precisions.fp8.history": 2, "precisions.fp8.power_of_two": True}
BLOCKS_OF_128 = {"model.hidden_size": 256, "model.num_attention_heads": 4, "model.num_kv_heads": 2}
FUSED = {**DELAYED, "kernels.norm_product": "fp8", "kernels.activation_product": "fp8"}
RECIPES: dict[str, dict[str, Any]] = {
    "tensorwise": {},
    "delayed": DELAYED,
    "fused": FUSED,
    "rowwise": {"precisions.fp8.scaling": "rowwise"},
    "blockwise": {**BLOCKS_OF_128, "precisions.fp8.scaling": "blockwise"},
}
