"""The stepper on one rank: several chunks in one process, the micro batches that it reads, the figures of its steps."""

from operator import length_hint
from typing import Any

import pytest

from mplug.training.assembly import build
from mplug.training.loop import launch_step
from mplug.training.report import PendingRecord
from mplug_testing.harness import difference, tiny_run, train_steps

ONE_RANK: dict[str, Any] = {"parallel.layout": "pp1", "trainer.micro_batch_size": 1, "trainer.precision": "fp64"}
TIED = {"model.tie_embeddings": True}


@pytest.mark.wide("layouts", quick=["{'parallel.pp.schedule': 'dualpipe-v'}"])
@pytest.mark.parametrize(
    "settings",
    [
        {"parallel.pp.schedule": "interleaved", "parallel.pp.chunks": 5},
        {"parallel.pp.schedule": "zb-h1", "parallel.pp.chunks": 3, "memory.recompute.mode": "full"},
        {"parallel.pp.schedule": "dualpipe-v"},
    ],
    ids=str,
)
def test_chunks_of_one_rank_hand_over_without_transfers_and_give_the_run_without_a_pipeline(
    settings: dict[str, Any],
) -> None:
    trace = train_steps({**ONE_RANK, **TIED, **settings})
    more = {name: value for name, value in settings.items() if not name.startswith("parallel.")}
    assert difference([trace], train_steps({**ONE_RANK, **TIED, **more, "parallel.layout": ""})) == ""
    assert [set(step.values()) for step in trace.announced] == [{1}, {1}]


def test_a_step_reads_micro_batches_when_it_needs_them_and_reports_its_bubble(monkeypatch: pytest.MonkeyPatch) -> None:
    run = tiny_run({**ONE_RANK, "parallel.pp.schedule": "interleaved"})
    parts = build(run)
    model, ahead, read, computed = parts.model, list[int](), 0, 0
    inner, take = model.run, parts.train_loader.take

    def count(batches: Any) -> Any:
        nonlocal read
        for batch in batches:
            read += 1
            yield batch

    class Counted:
        """Micro batches with the number that the loader promises."""

        wait_seconds = 0.0

        def __init__(self, batches: Any) -> None:
            self.hint, self.batches = length_hint(batches), count(batches)

        def __length_hint__(self) -> int:
            return self.hint

        def __iter__(self) -> Any:
            return self.batches

    def through(*arguments: Any) -> Any:
        nonlocal computed
        computed += 1
        ahead.append(read - computed)
        return inner(*arguments)

    monkeypatch.setattr(model, "run", through)
    monkeypatch.setattr(parts.train_loader, "take", lambda number: Counted(take(number)))
    run.step = 1
    result, _ = launch_step(run, parts, 8, 1e-3, 0.0)
    assert read == 8
    assert max(ahead) <= 0, "a micro batch was read before it was computed"
    assert 0 < PendingRecord(result, "cpu", 1, 8).read()["bubble"] < 1
