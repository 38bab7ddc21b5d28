"""Scans beside other features: each pair trains as one process does, or mplug refuses it with a reason."""

from typing import Any

import pytest
from scanning import HYBRID, SCANS

from mplug_testing.parity import require_parity

LORA: dict[str, Any] = {"adapters.lora.rank": 3}
FOUR = {**HYBRID, "model.num_layers": 4}
SINGLE = "trainer.micro_batch_size=1"
PAIRS: dict[str, tuple[dict[str, Any], str]] = {
    "muon": (HYBRID, "zero2 optimizer.name=muon"),
    "muon of all kinds": (SCANS, "zero2 optimizer.name=muon"),
    "zb-h1": (HYBRID, f"pp2 parallel.pp.schedule=zb-h1 {SINGLE}"),
    "zb-v": (FOUR, f"pp2 parallel.pp.schedule=zb-v {SINGLE}"),
    "zb-v of all kinds": (SCANS, f"pp2 parallel.pp.schedule=zb-v {SINGLE}"),
    "dualpipe-v": (FOUR, f"pp2 parallel.pp.schedule=dualpipe-v {SINGLE}"),
    "LoRA": ({**HYBRID, **LORA}, "tp2"),
    "LoRA of all kinds": ({**SCANS, **LORA}, "tp2"),
    "LoRA and stages": ({**HYBRID, **LORA}, "pp2"),
    "recomputed slots": (SCANS, "zero2 memory.recompute.mode=selective memory.recompute.slots=[scan,convolution]"),
    "recomputed units": (SCANS, "tp2 memory.recompute.mode=full"),
}


@pytest.mark.wide("layouts")
@pytest.mark.parametrize("pair", PAIRS)
def test_each_pair_trains_as_one_process(pair: str) -> None:
    require_parity(*PAIRS[pair])
