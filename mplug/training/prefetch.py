"""Move micro batches from loaders to the device, asynchronously: the copies overlap with computation.

A micro batch is read on request, never ahead. The stepper requests the next one while the device still runs the last
kernels that it launched, so reading and copying cost no device time. A step with a loss that is a mean over tokens
requests all of its micro batches when it begins (`mplug.training.token_scale`).
"""

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from mplug.contracts import Loader, MicroBatch
from mplug.run.activity import READING
from mplug.training.supervised_loader import Source, Supervised

Move = Callable[[MicroBatch], MicroBatch]


class Feed:
    """A loader whose micro batches are on the run's `device`; its position and its state are the loader's.

    With a `source`, it checks micro batches while they are on the CPU, and errors name the plugin and the samples.
    """

    def __init__(self, loader: Loader, device: str, source: Source | None = None) -> None:
        self.vocab_size = loader.vocab_size
        self._samples_of_each = 0 if source is None else source.shards * source.micro_batch_size
        self._loader: Loader | Supervised = loader if source is None else Supervised(loader, source)
        self._move: Move = Copies() if device.startswith("cuda") else _as_it_is

    @property
    def loader(self) -> Loader:
        """The loader itself, for its optional attributes (such as `fingerprint`)."""
        return self._loader.loader if isinstance(self._loader, Supervised) else self._loader

    @loader.setter
    def loader(self, loader: Loader) -> None:
        if isinstance(self._loader, Supervised):
            self._loader.loader = loader
        else:
            self._loader = loader

    def take(self, num_samples: int) -> "MovedBatches":
        """This rank's part of the next `num_samples` global samples, in micro batches on the device."""
        expected = -(-num_samples // self._samples_of_each) if self._samples_of_each else 0
        return MovedBatches(self._loader.take(num_samples), self._move, expected)

    def state_dict(self) -> dict[str, Any]:
        """The loader's state."""
        return self._loader.state_dict()

    def load_state_dict(self, state: dict[str, Any], samples: int = 0) -> None:
        """Continue at a saved state of the loader. `samples` is its number of global samples; errors report it."""
        if isinstance(self._loader, Supervised):
            self._loader.load_state_dict(state, samples)
        else:
            self._loader.load_state_dict(state)


class MovedBatches:
    """An iterator that moves micro batches to the device; `wait_seconds` is the CPU's time in the loader so far.

    `operator.length_hint` of it is the number of micro batches that the loader's contract promises; 0 if it is unknown.
    """

    def __init__(self, micro_batches: Iterable[MicroBatch], move: Move, expected: int = 0) -> None:
        self._micro_batches, self._move, self._expected = iter(micro_batches), move, expected
        self.wait_seconds = 0.0

    def __length_hint__(self) -> int:
        return self._expected

    def __iter__(self) -> Iterator[MicroBatch]:
        return self

    def __next__(self) -> MicroBatch:
        start = time.perf_counter()
        try:
            batch = next(self._micro_batches)
        finally:
            self.wait_seconds += time.perf_counter() - start
        return self._move(batch)


READING.add(MovedBatches.__next__.__code__)


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
