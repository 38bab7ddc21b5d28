"""Runs of the schedules: the run of one process. `--wide layouts` has more, and `--wide pairs` the other strategies."""

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import tiny_models
from layout_runs import assert_refused
from layout_words import COMPILING

from mplug_testing.parity import require_parity

Settings = dict[str, Any]
SCHEDULE = "parallel.pp.schedule"
TIED = {"model.tie_embeddings": True}
SMALL: Settings = {"model.num_layers": 6, "trainer.micro_batch_size": 1}
"""7 units with weights, for up to 7 chunks; 8 micro batches without data parallelism."""
EXPERTS: Settings = {**tiny_models.EXPERTS, "model.vocab_size": 320, "model.num_layers": 4}
RECOMPUTE = {"memory.recompute.mode": "full"}
SPLIT = ("zb-h1", "zb-v", "dualpipe-v", "zb-limited")

QUICK: list[tuple[str, Settings]] = [("zero2pp2", {SCHEDULE: "zb-h1", "trainer.global_batch_size": 6})]
"""`test_pp.py` and `test_runtime.py` have more quick ones; `tests/test_later.py` has a compiled one."""
WIDE: list[tuple[str, Settings]] = [
    ("pp2", {SCHEDULE: "interleaved", "parallel.pp.chunks": 3}),
    *product(("pp2", "pp3"), [{SCHEDULE: name} for name in ("interleaved", *SPLIT)]),
    *(("pp4", {SCHEDULE: name, "model.num_layers": 8}) for name in ("interleaved", *SPLIT)),
    *(("pp2", {SCHEDULE: "interleaved", "parallel.pp.chunks": 3, "trainer.global_batch_size": m}) for m in (1, 3, 5)),
    *(("pp3", {SCHEDULE: name, "trainer.global_batch_size": m}) for name in SPLIT for m in (1, 2, 4, 7)),
    ("pp2", {SCHEDULE: "interleaved", "parallel.pp.group": 3, "trainer.global_batch_size": 7}),
    ("pp2", {SCHEDULE: "zb-limited", "parallel.pp.limit": 3}),
    ("pp2", {SCHEDULE: "zb-v", "parallel.pp.split": [1, 2, 4, 1]}),
]
COMPILED: list[tuple[str, Settings]] = [
    ("pp2", {SCHEDULE: "interleaved"}),
    ("pp2", {SCHEDULE: "zb-h1"}),
    ("pp2", {SCHEDULE: "zb-v", **RECOMPUTE}),
    ("pp2", {SCHEDULE: "dualpipe-v"}),
    ("tp2pp2", {SCHEDULE: "zb-v"}),
    ("pp2ep2dp2", {SCHEDULE: "zb-h1", **EXPERTS}),
]


def cases() -> Iterator[Any]:
    yield from QUICK
    yield from (pytest.param(*case, marks=pytest.mark.wide("layouts")) for case in WIDE)
    for layout, settings in COMPILED:
        yield pytest.param(layout, {**settings, "trainer.compile": "inductor"}, marks=pytest.mark.wide("compile"))


@pytest.mark.wide("layouts")
@COMPILING
@pytest.mark.parametrize(("layout", "changes"), [*cases()], ids=str)
def test_a_schedule_gives_the_run_of_one_process(layout: str, changes: Settings) -> None:
    model = {} if "model.name" in changes else TIED
    require_parity({**SMALL, **model, **changes}, layout)


@pytest.mark.parametrize(
    ("layout", "said"),
    [
        ("zero2pp2 parallel.zero.stage=2 parallel.pp.schedule=interleaved", "one chunk of a rank's units at a time"),
        (
            "zero2pp2 parallel.zero.stage=2 parallel.pp.schedule=zb-h1",
            "the schedule 'zb-h1' of parallel/pp computes weight",
        ),
        (
            "fsdp2pp2 parallel.pp.schedule=zb-v",
            "parallel/fsdp frees a unit's weights at the end of its backward pass",
        ),
    ],
)
def test_a_strategy_that_needs_whole_backward_passes_is_refused(layout: str, said: str) -> None:
    assert_refused(layout, SMALL, said)
