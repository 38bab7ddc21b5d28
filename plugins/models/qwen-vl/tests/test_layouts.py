"""A model that sees computes the same under every layout: losses, gradients, norms and weights are those of a process.

Micro batches hold 0 to 3 pictures a sample, of sizes that differ. Some micro batches have none.
"""

from typing import Any

import pytest
import seeing_runs
from layout_words import COMPILING
from seeing_runs import QWEN_VL, WINDOWS

from mplug_testing.parity import require_parity

SEEN = {"data.media": 3, "data.media_sides": [8, 24], "trainer.seq_length": 32}
TOWER = {**seeing_runs.TOWER, "typical_patches": 24}
PACKED = {"data.documents": 3}
BY_DOCUMENTS = {"parallel.cp.method": "all_gather", "parallel.cp.divide": "documents", "parallel.cp.equal_length": 16}
FROZEN_TOWER = {"model.frozen": ["tower"]}
FROZEN_DECODER = {"model.frozen": ["embedding", "blocks", "head"]}
EXPERTS = {"model.num_experts": 4, "model.moe_ffn_hidden_size": 16}
COMPILED = {"trainer.compile": "aot_eager"}
BALANCED = {"parallel.balance": True}
VIDEOS = {
    "data.media_frames": [1, 5],
    "trainer.seq_length": 64,
    "model.vision": {**TOWER, "video_max_pixels": 1600},
}
TIMED = {"data.media_frames": [1, 5], "model.vision": {**TOWER, **WINDOWS}}
"""Videos with times in the text, and with times as positions."""
SINGLY = {**BALANCED, "trainer.micro_batch_size": 1}
"""Micro batches of a sample: many have no picture."""
CLIPPED = {"optimizer.name": "muon", "optimizer.qk_clip": 0.02, "model.qk_norm": False}
"""Logits of tokens, whose keys ranks gather, and of pictures, which are whole on a rank."""
WIDE = pytest.mark.wide("layouts")
CASES = [  # the array `seeing` of the set `pairs` has each strategy on two ranks, also packed, compiled and balanced
    pytest.param("tp2pp2", {}, id="tp2pp2"),
    pytest.param("cp2", PACKED, id="cp2 packed"),
    pytest.param("cp2", {**PACKED, **BY_DOCUMENTS}, id="cp2 documents"),
    pytest.param("cp2", CLIPPED, id="cp2 clipped"),
    pytest.param("fsdp2", FROZEN_TOWER, id="fsdp2 frozen tower"),
    pytest.param("tp2", {**COMPILED, "model.vision": {**TOWER, **WINDOWS}}, id="tp2 compiled windows", marks=WIDE),
    pytest.param("fsdp2", SINGLY, id="fsdp2 balanced samples", marks=WIDE),
    pytest.param("dp2tp2", {**BALANCED, "model.vision": {**TOWER, **WINDOWS}}, id="dp2tp2 balanced windows"),
    pytest.param("dp2pp2", BALANCED, id="dp2pp2 balanced", marks=WIDE),
    pytest.param("cp2", {**VIDEOS, **PACKED}, id="cp2 packed videos"),
    pytest.param("tp2pp2", VIDEOS, id="tp2pp2 videos", marks=WIDE),
    pytest.param("fsdp2", TIMED, id="fsdp2 timed videos", marks=WIDE),
    pytest.param("cp2", TIMED, id="cp2 timed videos", marks=WIDE),
    pytest.param("tp2pp2", TIMED, id="tp2pp2 timed videos", marks=WIDE),
    pytest.param("tp4 model.num_kv_heads=4 model.vision.num_attention_heads=4", {}, id="tp4", marks=WIDE),
    pytest.param("pp2", FROZEN_TOWER, id="pp2 frozen tower", marks=WIDE),
    pytest.param("pp2", FROZEN_DECODER, id="pp2 frozen decoder", marks=WIDE),
    pytest.param("pp4", {}, id="pp4", marks=WIDE),
    pytest.param("cp2pp2", {}, id="cp2pp2", marks=WIDE),
    pytest.param("cp2tp2", {**PACKED, **BY_DOCUMENTS}, id="cp2tp2 documents", marks=WIDE),
    pytest.param("cp2", {**VIDEOS, **PACKED, **BY_DOCUMENTS}, id="cp2 videos documents", marks=WIDE),
    pytest.param("dp2cp2", {**BALANCED, **PACKED, **BY_DOCUMENTS}, id="dp2cp2 balanced documents", marks=WIDE),
    pytest.param("dp2cp2", {}, id="dp2cp2", marks=WIDE),
    pytest.param("fsdp2tp2", {}, id="fsdp2tp2", marks=WIDE),
    pytest.param("tp2", FROZEN_DECODER, id="tp2 frozen decoder", marks=WIDE),
    pytest.param("ep2", EXPERTS, id="ep2", marks=WIDE),
    pytest.param("dp4", BALANCED, id="dp4 balanced", marks=WIDE),
    pytest.param("dp2cp2", {**BALANCED, **PACKED}, id="dp2cp2 balanced packed", marks=WIDE),
    pytest.param("zero2", BALANCED, id="zero2 balanced", marks=WIDE),
    pytest.param("fsdp2", {**BALANCED, **FROZEN_TOWER}, id="fsdp2 balanced frozen tower", marks=WIDE),
    pytest.param("dp2fsdp2", BALANCED, id="dp2fsdp2 balanced", marks=WIDE),
    pytest.param("dp2tp2 parallel.tp.sequence_parallel=false", BALANCED, id="dp2tp2 balanced whole", marks=WIDE),
    pytest.param("dp2pp2", {**BALANCED, **FROZEN_DECODER}, id="dp2pp2 balanced frozen decoder", marks=WIDE),
    pytest.param("dp2pp2 parallel.pp.schedule=zb-h1", SINGLY, id="dp2pp2 balanced zb-h1", marks=WIDE),
    pytest.param("ep2", {**BALANCED, **EXPERTS}, id="ep2 balanced", marks=WIDE),
]


@pytest.mark.wide("families", quick=["tp2pp2"])
@COMPILING
@pytest.mark.parametrize(("layout", "settings"), CASES)
def test_a_layout_computes_what_one_process_does(layout: str, settings: dict[str, Any]) -> None:
    require_parity({**QWEN_VL, **SEEN, "model.vision": TOWER, **settings}, layout)
