"""Evaluation: the mean loss over the validation samples. If the run must stop, all ranks end it early together."""

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from mplug.contracts.micro_batch import RankBatch
from mplug.run.run import Run
from mplug.training.assembly import Parts
from mplug.training.feed import Feed
from mplug.training.validation import Evaluation
from mplug_validation.averages import evaluated_in_place

PAUSE = 0.25
"""Minimum time between votes, in seconds, if micro batches are shorter than that."""


Watch = Callable[[Iterator[RankBatch]], Iterator[RankBatch]]


def evaluate(run: Run, parts: Parts, watch: Watch = iter) -> float:
    """The mean validation loss in nats per token, over the same `trainer.eval_samples` samples every time.

    `watch` wraps the iterator over micro batches that the stepper receives.
    """
    assert parts.validation_loader is not None
    beginning = parts.validation_loader.state_dict()
    with evaluated_in_place(run, parts):
        loss = float(parts.stepper.evaluate(watch(_micro_batches(run, parts.validation_loader))))
    parts.validation_loader.load_state_dict(beginning)
    return loss


class Validation:
    """The class of the entry-point group 'mplug.validations'."""

    def evaluate_unless_stopped(self, run: Run, parts: Parts, due: Callable[[float], bool]) -> Evaluation:
        """Evaluate; if any rank is asked to stop in the meantime, all ranks end before the same micro batch."""
        assert parts.validation_loader is not None
        beginning = parts.validation_loader.state_dict()
        counted = CountedTargets(_micro_batches(run, parts.validation_loader), run)
        batches = UntilStopped(counted, run, len(parts.model.stages.units), due)
        with evaluated_in_place(run, parts):
            loss = parts.stepper.evaluate(batches)
            batches.finish()
        if batches.left:
            return Evaluation(None, stop=True)
        parts.validation_loader.load_state_dict(beginning)
        mean = float(loss)
        return Evaluation(mean, batches.stop, not math.isnan(mean) or counted.total() != 0)


def _micro_batches(run: Run, feed: Feed) -> Iterator[RankBatch]:
    return feed.take_evenly(run.config.trainer.eval_samples)


class CountedTargets:
    """Micro batches, and the number of targets in those that were taken."""

    def __init__(self, batches: Iterable[RankBatch], run: Run) -> None:
        self._batches, self._run = batches, run
        self._targets: int | torch.Tensor = 0

    def __iter__(self) -> Iterator[RankBatch]:
        for batch in self._batches:
            if batch.targets is not None:
                self._targets = self._targets + batch.targets  # the CPU does not wait for a device
            yield batch

    def total(self) -> int:
        """The targets of all ranks. Collective."""
        own = int(self._targets) if self._run.counts_samples else 0
        return int(self._run.summed(torch.tensor(own, device=self._run.device)))


class UntilStopped:
    """An iterator over micro batches that ends early if any rank asks to stop (`stop`); `left` is then true.

    Every rank takes the same number. Ranks vote before a micro batch, and read that vote before a later one: pipeline
    stages are at different micro batches at the same time. With as many micro batches between vote and reading as there
    are stages, no stage waits for another; `finish` reads the last votes. Votes also carry the duration of micro
    batches; if these are short, ranks vote less often.
    """

    def __init__(self, batches: Iterable[RankBatch], run: Run, stages: int, due: Callable[[float], bool]) -> None:
        self._batches, self._run, self._age, self._due = iter(batches), run, stages, due
        self._group = run.groups.beside("votes") if run.groups is not None else None
        self._votes: deque[tuple[int, Any, torch.Tensor]] = deque()
        self._number = self._next_vote = 0
        self._began = time.monotonic()
        self.stop = self.left = False

    def __iter__(self) -> Iterator[RankBatch]:
        return self

    def __next__(self) -> RankBatch:
        if self._number > 0:  # steppers need not support an evaluation without micro batches
            self._vote()
        if self.stop:
            self.left = True
        batch = next(self._batches, None) if not self.left else None
        if batch is None:
            raise StopIteration
        self._number += 1
        return batch

    def finish(self) -> None:
        """Read the votes that are left. Call it after the evaluation.

        A stage that learns that there are no more micro batches may still owe the next stage the last one. If it waited
        for that stage's vote first, both would wait forever.
        """
        while self._votes:
            self._read()

    def _vote(self) -> None:
        seconds = (time.monotonic() - self._began) / self._number
        must_stop = self._run.stop_requested or self._due((self._age + 1) * seconds)
        if self._group is None:
            self.stop = must_stop
            return
        if self._number >= self._next_vote:
            vote = torch.tensor([float(must_stop), seconds], dtype=torch.float64)
            self._votes.append((self._number, dist.all_reduce(vote, dist.ReduceOp.MAX, self._group, True), vote))
            self._next_vote = self._number + 1
        while self._votes and self._votes[0][0] + self._age <= self._number:
            self._read()

    def _read(self) -> None:
        number, vote, result = self._votes.popleft()
        vote.wait()
        must_stop, seconds = result.tolist()
        self.stop = self.stop or must_stop > 0
        self._next_vote = max(self._next_vote, number + int(PAUSE / max(seconds, 1e-6)))
