"""Evaluations that are left early, because the run is asked to stop: when, by whom, and with what result."""

import io
import json
import math
import os
import signal
import time
from collections.abc import Iterator
from contextlib import redirect_stderr
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mplug.contracts.micro_batch import IGNORED, RankBatch
from mplug.distributed.groups import Groups
from mplug.layout.mesh import Mesh
from mplug.registry.hooks import HOST
from mplug.run.prepare import prepare
from mplug.run.run import Run
from mplug.training.feed import Feed
from mplug.training.loop import Ending, train
from mplug.training.metrics_writer import MetricsFile
from mplug_testing.harness import as_rank, tiny_config
from mplug_testing.workers import run_workers
from mplug_validation import UntilStopped, evaluation

SHORT = {"trainer.steps": 4, "trainer.eval_every": 2, "trainer.eval_samples": 400, "checkpoint.every": 3}


def never(seconds: float) -> bool:
    return False


class Counting:
    """Micro batches of evaluations, counted as they are taken; at one of them, something happens on one rank."""

    def __init__(self, at: int, rank: int, happens: Any) -> None:
        self.at, self.rank, self.happens, self.taken = at, rank, happens, 0

    def __call__(self, run: Run, feed: Feed) -> Iterator[RankBatch]:
        for batch in feed.take_evenly(run.config.trainer.eval_samples):
            self.taken += 1
            if self.taken == self.at and run.rank == self.rank:
                self.happens()
            yield batch


def terminated() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def stopped(
    folder: Path, layout: str, rank: int, changes: dict[str, Any], deadline: float | None = None
) -> tuple[Ending, int]:
    """How a run ends that is stopped at the third micro batch of an evaluation, and how many of them a rank has taken.

    SIGTERM stops it, or the hour that passes on rank 0's clock where a deadline is given.
    """
    with pytest.MonkeyPatch.context() as patch:
        now = time.time
        happens = terminated if deadline is None else lambda: patch.setattr(time, "time", lambda: now() + 3600)
        counting = Counting(3, rank, happens)
        patch.setattr(evaluation, "_micro_batches", counting)
        config = tiny_config({**SHORT, "parallel.layout": layout, **changes})
        run = as_rank(prepare(config, {f"{HOST}metrics": MetricsFile()}, folder))
        return train(run, deadline=deadline), counting.taken


def assert_saved_without_result(folder: Path, step: int) -> None:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, step + 1))
    assert "val_loss" not in lines[-1]
    assert (folder / "checkpoints" / f"step_{step:08d}").is_dir()


@pytest.mark.parametrize(
    ("why", "every"), [("a signal", 2), ("a signal in the last evaluation", 4), ("time that runs out", 2)]
)
@pytest.mark.wide("kills", quick=["a signal-2", "time that runs out-2"])
def test_an_evaluation_ends_after_the_micro_batch_in_which_a_stop_is_asked_for(
    tmp_path: Path, why: str, every: int
) -> None:
    of_time = why == "time that runs out"
    deadline = time.time() + 1800 if of_time else None
    found = stopped(tmp_path, "", 0, {"trainer.eval_every": every}, deadline=deadline)
    assert found == (Ending(None, None if of_time else signal.SIGTERM, out_of_time=of_time), 3)
    assert_saved_without_result(tmp_path, every)


@pytest.mark.parametrize(
    ("layout", "size", "rank", "lag"),
    [
        ("pp3", 3, 0, 4),
        ("pp2", 2, 0, 2),
        pytest.param("pp2", 2, 1, 2, marks=pytest.mark.wide("kills")),
        ("dp2", 2, 1, 1),
    ],
)
@pytest.mark.wide("kills", quick=["pp2-2-0-2", "dp2-2-1-1"])
def test_all_ranks_leave_an_evaluation_after_the_same_micro_batch(
    tmp_path: Path, layout: str, size: int, rank: int, lag: int
) -> None:
    endings, taken = zip(*run_workers(size, voting_on_each, tmp_path, layout, rank, timeout=60), strict=True)
    assert endings == (Ending(None, signal.SIGTERM),) * size
    assert len(set(taken)) == 1
    assert 3 <= taken[0] <= 3 + lag
    assert_saved_without_result(tmp_path, 2)


def voting_on_each(folder: Path, layout: str, rank: int) -> tuple[Ending, int]:
    evaluation.PAUSE = 0.0  # as where a micro batch takes longer
    return stopped(folder, layout, rank, {})


@pytest.mark.parametrize("samples", [2, 10])
@pytest.mark.wide("kills", quick=["2"])
def test_a_stage_passes_on_what_it_owes_before_it_waits_for_votes(tmp_path: Path, samples: int) -> None:
    """A middle stage receives before it sends. The evaluation ends in the middle of a table of 4 micro batches."""
    (alone,) = run_workers(1, evaluated, tmp_path / "alone", "", samples)
    assert alone is not None
    assert run_workers(3, evaluated, tmp_path / "pp3", "pp3", samples, timeout=60) == [pytest.approx(alone)] * 3


def evaluated(folder: Path, layout: str, samples: int) -> float | None:
    """The validation loss of a run that ends with an evaluation of that many samples, with a vote on each."""
    evaluation.PAUSE = 0.0
    changes = {"trainer.steps": 1, "trainer.eval_every": 1, "trainer.eval_samples": samples, "parallel.layout": layout}
    return train(as_rank(prepare(tiny_config(changes), {}, folder))).val_loss


def without_targets(run: Run, feed: Feed) -> Iterator[RankBatch]:
    for batch in feed.take_evenly(run.config.trainer.eval_samples):
        labels = torch.full_like(batch["labels"], IGNORED)
        yield replace(batch, entries={**batch.entries, "labels": labels}, targets=0)


def test_an_evaluation_without_targets_says_so(tmp_path: Path) -> None:
    said, _ = run_workers(2, evaluated_without_targets, tmp_path, "pp2")
    assert "the 8 samples of the evaluation have no target" in said


def evaluated_without_targets(folder: Path, layout: str) -> str:
    """The standard error of a run whose samples of the evaluation have no target."""
    err = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stderr(err):
        patch.setattr(evaluation, "_micro_batches", without_targets)
        found = evaluated(folder, layout, 8)
    assert found is not None
    assert math.isnan(found)
    return err.getvalue()


# Votes.


def leave(asking: int, at: int, stages: int, pause: float) -> tuple[list[int], bool, bool]:
    """What a rank gets of 40 micro batches, where one rank asks to stop before it takes number `at`."""
    evaluation.PAUSE = pause
    rank = dist.get_rank()
    run = Run(None, None, Mesh.of([], dist.get_world_size()), "cpu", rank, groups=Groups(rank))  # type: ignore[arg-type]
    batches: Iterator[Any] = iter(range(40))
    found, given = UntilStopped(batches, run, stages, never), []
    for number in found:
        given.append(number)
        run.stop_requested = rank == asking and number >= at
        time.sleep(0.002 * rank)  # stages are at different micro batches
    found.finish()
    return given, found.stop, found.left  # type: ignore[return-value]


def leave_in_many_ways() -> list[tuple[list[int], bool, bool]]:
    ways = [(0, 5, 1, 0.0), (2, 5, 3, 0.0), (1, 20, 3, 0.05), (1, 39, 3, 0.0), (0, 99, 1, 0.0), (0, 99, 3, 9.0)]
    return [leave(*way) for way in ways]


def test_votes_take_all_ranks_out_together() -> None:
    first, *others = run_workers(3, leave_in_many_ways)
    assert all(other == first for other in others)
    soon, staged, sparse, at_the_end, never_asked, never_voted = first
    assert soon == (list(range(7)), True, True)
    assert staged == (list(range(9)), True, True)
    assert len(sparse[0]) > 20
    assert at_the_end[0] == list(range(40))
    assert at_the_end[1:] == (True, False), "complete, and the run stops nevertheless"
    assert never_asked == never_voted == (list(range(40)), False, False)
