"""The feed of a step: from a loader's micro batches to this rank's parts of them on the device.

A micro batch is read when the stepper requests it, never before: the device still runs the kernels that were launched
last, so reading and copying cost no device time. While it is on the CPU, the feed checks it, adds the entries that the
plan makes from others, counts its positions and targets, and cuts this rank's part out of it. Only that part is copied
to the device, asynchronously. A step with a loss that is a mean over tokens requests all of its micro batches when it
begins (`mplug_steps.TokenScale`).
"""

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mplug.contracts.loader import Loader
from mplug.contracts.micro_batch import DOCUMENTS, MicroBatch, RankBatch
from mplug.errors import RunError
from mplug.model.stream_balancer import RowMover
from mplug.run.activity import READING
from mplug.training.batch_parts import count_targets, without_extra_targets
from mplug.training.division import Measured, division
from mplug.training.faults import faults
from mplug.training.source import Source

if TYPE_CHECKING:
    from mplug.layout.plan import Plan

Change = Callable[[MicroBatch], MicroBatch]


class Feed:
    """A loader, and this rank's parts of its micro batches on the run's `device`. Position and state are the loader's.

    With a `source`, it checks micro batches while they are on the CPU, and errors name the plugin and the samples.
    `cut` returns this rank's part of a whole micro batch; by default it is all of it. `mover` replaces `cut` if ranks
    exchange rows of streams. Of the entries `idle`, which no unit of this rank takes, only the shapes reach the device.
    With `shares`, it measures the work of ranks that divide samples by documents; document lengths stay on the CPU.
    """

    def __init__(
        self,
        loader: Loader,
        device: str,
        source: Source | None = None,
        cut: Change | None = None,
        mover: RowMover | None = None,
        idle: Collection[str] = (),
        shares: Measured | None = None,
    ) -> None:
        self.vocab_size = loader.vocab_size
        self._part, self._shards = (0, 1) if source is None else (source.part, source.shards)
        self._micro_batch_size = 0 if source is None else source.micro_batch_size
        self._plan = None if source is None else source.plan
        checking = None if source is None else faults()
        self._is_checked = checking is not None
        self._loader: Any = loader if checking is None or source is None else checking.supervised(loader, source)
        move: Change = Copies() if device.startswith("cuda") else _as_it_is
        if idle:
            move = partial(_moved_but, frozenset(idle), device, move)
        if shares is not None:
            move = partial(_moved_without, frozenset({DOCUMENTS}), move)
        self._own = partial(_cut_and_moved, cut or _as_it_is, move) if mover is None else partial(mover.own, move)
        self._shares = shares

    @property
    def loader(self) -> Loader:
        """The loader itself, for what it states of itself (such as `fingerprint`)."""
        loader: Loader = self._loader.loader if self._is_checked else self._loader
        return loader

    @loader.setter
    def loader(self, loader: Loader) -> None:
        if self._is_checked:
            self._loader.loader = loader
        else:
            self._loader = loader

    def imbalances(self) -> dict[str, float]:
        """The work of the rank with the most in the last step, over the mean of ranks, where it is known.

        `work_imbalance` is that of data-parallel ranks; `Measured` names those of ranks that divide samples.
        """
        own: float | None = getattr(self.loader, "imbalance", None)
        divided = {} if self._shares is None else self._shares.take()
        return divided if own is None else {"work_imbalance": own, **divided}

    def take(self, num_samples: int) -> "RankBatches":
        """The micro batches of a step of the next `num_samples` global samples."""
        start, stop = (num_samples * part // self._shards for part in (self._part, self._part + 1))
        return self._batches(self._loader.take(num_samples), stop - start)

    def take_evenly(self, num_samples: int) -> "RankBatches":
        """The micro batches of an evaluation on `num_samples` samples; their number and sizes are equal on every rank.

        Ranks that communicate inside a unit (by exchanging tokens) must all run the same number of micro batches. If
        the ranks do not divide the samples, a few more samples are read, and the labels of the extra ones are ignored.
        """
        each = -(-num_samples // self._shards)
        batches = self._loader.take(each * self._shards)
        return self._batches(without_extra_targets(batches, num_samples - self._part * each), each)

    def step_of(self, batches: Sequence[MicroBatch]) -> "RankBatches":
        """The micro batches of a step of these whole micro batches, which need not come from the loader."""
        return self._batches(batches, sum(len(batch["sample_ids"]) for batch in batches))

    def _batches(self, batches: Iterable[MicroBatch], num_samples: int) -> "RankBatches":
        expected = -(-num_samples // self._micro_batch_size) if self._micro_batch_size else 0
        expected = len(batches) if isinstance(batches, Sequence) else expected
        return RankBatches(batches, num_samples, expected, self._own, self._plan, self._shares)

    def state_dict(self) -> dict[str, Any]:
        """The loader's state."""
        state: dict[str, Any] = self._loader.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any], samples: int = 0) -> None:
        """Continue at a saved state of the loader. `samples` is its number of global samples; errors report it."""
        if self._is_checked:
            self._loader.load_state_dict(state, samples)
        else:
            self._loader.load_state_dict(state)


class RankBatches:
    """An iterator over a rank's parts of the micro batches of a step; it marks the part that ends the step.

    `own` returns this rank's part of a whole micro batch, on the device. `num_samples` is the number of samples in all
    of them. `wait_seconds` is the CPU's time in the loader so far.
    `operator.length_hint` is the number of micro batches that the loader's contract promises; 0 if it is unknown.
    """

    def __init__(
        self,
        batches: Iterable[MicroBatch],
        num_samples: int,
        expected: int,
        own: Change,
        plan: "Plan | None" = None,
        shares: Measured | None = None,
    ) -> None:
        self._batches, self._own, self._plan, self._shares = iter(batches), own, plan, shares
        self._expected, self._unread, self._number = expected, num_samples, 0
        self.wait_seconds = 0.0

    def __length_hint__(self) -> int:
        return self._expected

    def __iter__(self) -> Iterator[RankBatch]:
        return self

    def __next__(self) -> RankBatch:
        whole = self._read()
        self._unread -= len(whole["sample_ids"])
        if self._unread < 0:
            raise RunError(f"the data loader has {-self._unread} samples more than the step")
        number, self._number = self._number, self._number + 1
        positions, targets = count_targets(whole, self._plan)
        rows = {} if self._plan is None or not self._plan.streams else division().count_rows(whole, self._plan)
        if self._shares is not None:
            self._shares.add(whole)
        return RankBatch(self._own(whole), number, self._unread == 0, positions, targets, rows)

    def _read(self) -> MicroBatch:
        """The loader's next micro batch. What follows may wait for other ranks (`RowMover`), and no longer for data."""
        start = time.perf_counter()
        try:
            return next(self._batches)
        except StopIteration:
            if self._unread:
                raise RunError(f"the data loader ended {self._unread} samples before the end of the step") from None
            raise
        finally:
            self.wait_seconds += time.perf_counter() - start


READING.add(RankBatches._read.__code__)


def _cut_and_moved(cut: Change, move: Change, whole: MicroBatch) -> MicroBatch:
    return move(cut(whole))


def _moved_without(kept: Collection[str], move: Change, batch: MicroBatch) -> MicroBatch:
    """The micro batch on the device, but for the entries `kept`, which stay where they are."""
    moved = move({name: x for name, x in batch.items() if name not in kept})
    return {**moved, **{name: batch[name] for name in kept if name in batch}}


def _moved_but(idle: Collection[str], device: str, move: Change, batch: MicroBatch) -> MicroBatch:
    """The micro batch on the device; the entries `idle` are zeros without memory there.

    Stages of a pipeline agree on the sizes of messages by the shapes of all entries.
    """
    moved = move({name: x for name, x in batch.items() if name not in idle})
    shapes = {name: batch[name] for name in idle if name in batch}
    return {**moved, **{name: x.new_zeros((), device=device).expand(x.shape) for name, x in shapes.items()}}


def _as_it_is(batch: MicroBatch) -> MicroBatch:
    return batch


class Copies:
    """Copies micro batches to the current GPU on a separate stream; entries on a GPU are not copied."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()

    def __call__(self, batch: MicroBatch) -> MicroBatch:
        """The micro batch on the GPU; the current stream waits for the copies, the CPU does not."""
        computing = torch.cuda.current_stream()
        with torch.cuda.stream(self._stream):
            moved = {name: x if x.is_cuda else self._copied(x) for name, x in batch.items()}
        computing.wait_stream(self._stream)
        for name, copied in moved.items():
            if copied is not batch[name]:
                copied.record_stream(computing)  # the copying stream allocated it, and the computing stream uses it
        return moved

    def _copied(self, x: Tensor) -> Tensor:
        # The source must be contiguous pinned memory; any other source makes the CPU wait. Torch does not reuse that
        # memory before the copies from it are complete.
        pinned = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
        return pinned.copy_(x).to(self._stream.device, non_blocking=True)
