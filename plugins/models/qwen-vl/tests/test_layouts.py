"""Runs with images under layouts are those of one process in fp64; some micro batches of some ranks have no image."""

from typing import Any

import pytest

from mplug_testing.parity import require_parity

WIDE = pytest.mark.wide("layouts")
SEEING: dict[str, Any] = {
    "model.name": "qwen-vl",
    "model.preset": "tiny",
    "model.num_layers": 3,
    "model.hidden_size": 32,
    "model.ffn_hidden_size": 48,
    "model.rope_sections": [2, 1, 1],
    "model.num_kv_heads": 2,
    "model.vocab_size": 512,
    "model.init_std": 0.06,
    "model.vision.hidden_size": 24,
    "model.vision.num_attention_heads": 2,
    "model.vision.ffn_hidden_size": 32,
    "model.vision.patch_size": 2,
    "model.vision.position_grid": 4,
    "model.vision.init_std": 0.06,
    "data.name": "qwen-vl-mock",
    "data.longest": 3,
    "data.frames": 2,
    "trainer.seq_length": 48,
}
WINDOWS = {
    "model.rope_division": "contiguous",
    "model.vision.activation": "swiglu",
    "model.vision.norm": "rmsnorm",
    "model.vision.norm_bias": False,
    "model.vision.position_grid": None,
    "model.vision.window_size": 8,
    "model.vision.full_attention_blocks": [1],
    "model.vision.deepstack_blocks": [],
    "model.vision.tokens_per_second": 2,
}
"""The tower of Qwen2.5-VL."""
EXPERTS = {"model.num_experts": 4, "model.moe_ffn_hidden_size": 16}
TOWER, DECODER = ["tower"], ["embedding", "blocks", "head"]
CASES = {
    "fsdp2, packed": ("fsdp2", {"data.documents": 3}),
    "pp2": ("pp2", {}),
    "tp2, windows": ("tp2 parallel.tp.sequence_parallel=false", WINDOWS),
    "ep2": ("ep2", EXPERTS),
    "zero2, frozen tower": ("zero2", {"model.frozen": TOWER}),
}
FURTHER = {
    "dp2": ("dp2", {}),
    "dp2, frozen decoder": ("dp2", {"model.frozen": DECODER}),
    "fsdp2, recompute": ("fsdp2", {"memory.recompute.mode": "full"}),
    "fsdp2, lora": ("fsdp2", {"adapters.lora.rank": 2}),
    "pp4, windows": ("pp4", WINDOWS),
    "fsdp2tp2": ("fsdp2tp2 parallel.tp.sequence_parallel=false", {}),
    "tp2pp2": ("tp2pp2 parallel.tp.sequence_parallel=false", {}),
}


@pytest.mark.parametrize("case", [*CASES, *(pytest.param(case, marks=WIDE) for case in FURTHER)])
def test_a_layout_gives_the_run_of_one_process(case: str) -> None:
    layout, further = {**CASES, **FURTHER}[case]
    require_parity({**SEEING, **further}, layout, named_by_author=True)
