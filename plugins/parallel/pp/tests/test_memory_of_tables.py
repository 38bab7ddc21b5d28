"""`benchmarks/pipeline_memory.py`: the memory that ranks hold is what the tables of their schedules predict."""

from argparse import Namespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from scripts import script

from mplug_testing.live_bytes import LiveBytes

SMALL = ("num_layers=4", "hidden_size=32", "num_attention_heads=2", "vocab_size=64")
RATIO = -1
"""The column of measured / predicted."""


@pytest.fixture(scope="module")
def benchmark() -> Any:
    return script("benchmarks/pipeline_memory.py")


def ratios(benchmark: Any, built_for: tuple[str, int], stages: int, *more: str) -> dict[tuple[str, int], float]:
    """Measured / predicted by (schedule, rank)."""
    schedules = [name for names in benchmark.BUILDS.values() for name in names]
    settings = [f"model.{one}" for one in SMALL] + ["trainer.device=cpu", *more]
    options = Namespace(schedules=schedules, measured=5, repeats=0, preset="", precision="fp32", seq_length=16)
    options.assignments = settings
    with patch.object(benchmark.wire, "Wire", benchmark.LoneWire), LiveBytes() as live:
        rows, _ = benchmark.measure(stages, built_for, options, benchmark.OfCpu(live))
    return {(row[0], row[1]): float(row[RATIO]) for row in rows}


@pytest.mark.wide("layouts")
@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("built_for", [("zb-h1", 1), ("zb-v", 2), ("zb-h1", 2)])
def test_ranks_of_every_schedule_hold_what_its_table_predicts(
    benchmark: Any, built_for: tuple[str, int], stages: int
) -> None:
    found = ratios(benchmark, built_for, stages, "model.num_layers=8")
    assert len(found) >= stages
    assert all(0.98 < ratio < 1.02 for ratio in found.values()), found


def test_live_bytes_are_counted_until_a_tensor_is_freed() -> None:
    given = torch.ones(100)
    with LiveBytes() as live:
        first = given + 1
        assert (live.held, live.peak) == (400, 400)
        view = first[:10]
        del first
        assert live.held == 400  # the view keeps the memory
        given.mul_(2)
        second = torch.cat([view, view])
        del view
        assert (live.held, live.peak) == (80, 480)
        live.reset_peak()
        assert live.peak == 80
        del second
        assert live.held == 0
