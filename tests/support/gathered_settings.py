"""Settings of runs that gather copies of weights, by recipe."""

from typing import Any

Settings = dict[str, Any]
FSDP2: Settings = {
    "kernels.linear": "fp8",
    "model.num_layers": 3,
    "trainer.precision": "fp8",
    "parallel.layout": "fsdp2",
}
COPIES: Settings = {"parallel.fsdp.gather": "copies"}
DELAYED: Settings = {"precisions.fp8.when": "delayed", "precisions.fp8.history": 2}
BLOCKS: Settings = {
    "precisions.fp8.scaling": "blockwise",
    "model.hidden_size": 256,
    "model.num_attention_heads": 4,
    "model.num_kv_heads": 2,
}
