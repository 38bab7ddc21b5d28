"""From loaders to the device: micro batches travel beside what is computed, and the host does not wait for it.

A micro batch is read when it is asked for, never before. Whoever computes asks for the next one while the device is
still busy with what was launched last, so reading and copying cost no time of the device's.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from mplug.contracts import Loader, MicroBatch
from mplug.supervision import Source, Supervised

Move = Callable[[MicroBatch], MicroBatch]


class Feed:
    """A loader whose micro batches are on the run's `device`. What it has taken, and its state, are the loader's.

    With a `source`, micro batches are checked while they are on the CPU, and failures name the plugin and the samples.
    """

    def __init__(self, loader: Loader, device: str, source: Source | None = None) -> None:
        self.vocab_size = loader.vocab_size
        self._reading: Loader | Supervised = loader if source is None else Supervised(loader, source)
        self._move: Move = Copies() if device.startswith("cuda") else _as_it_is

    @property
    def loader(self) -> Loader:
        """The loader itself, for what it states."""
        return self._reading.loader if isinstance(self._reading, Supervised) else self._reading

    @loader.setter
    def loader(self, loader: Loader) -> None:
        if isinstance(self._reading, Supervised):
            self._reading.loader = loader
        else:
            self._reading = loader

    def take(self, num_samples: int) -> "Taken":
        """This rank's part of the next `num_samples` global samples, in micro batches on the device."""
        return Taken(self._reading.take(num_samples), self._move)

    def state_dict(self) -> dict[str, Any]:
        """The loader's."""
        return self._reading.state_dict()

    def load_state_dict(self, state: dict[str, Any], samples: int = 0) -> None:
        """Continue where the loader's state was taken: after so many global samples, which failures name."""
        if isinstance(self._reading, Supervised):
            self._reading.load_state_dict(state, samples)
        else:
            self._reading.load_state_dict(state)


class Taken:
    """Micro batches that are read one by one; `waited` are the seconds that the host has waited for the loader."""

    def __init__(self, micro_batches: Iterable[MicroBatch], move: Move) -> None:
        self._unread, self._move = iter(micro_batches), move
        self.waited = 0.0

    def __iter__(self) -> Iterator[MicroBatch]:
        return self

    def __next__(self) -> MicroBatch:
        began = time.perf_counter()
        try:
            batch = next(self._unread)
        finally:
            self.waited += time.perf_counter() - began
        return self._move(batch)


def _as_it_is(batch: MicroBatch) -> MicroBatch:
    return batch


class Copies:
    """Copies micro batches to the current GPU on a stream of their own; entries that are there already stay."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()

    def __call__(self, batch: MicroBatch) -> MicroBatch:
        """The micro batch on the GPU; the stream that is current now waits for the copies, the host does not."""
        computing = torch.cuda.current_stream()
        with torch.cuda.stream(self._stream):
            moved = {name: x if x.is_cuda else self._copied(x) for name, x in batch.items()}
        computing.wait_stream(self._stream)
        for name, copied in moved.items():
            if copied is not batch[name]:
                copied.record_stream(computing)  # its memory is the copying stream's, and in use by the computing one
        return moved

    def _copied(self, x: Tensor) -> Tensor:
        # From contiguous pinned memory: any other source makes the host wait. Torch gives that memory to no one else
        # before the copies from it are over.
        pinned = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
        return pinned.copy_(x).to(self._stream.device, non_blocking=True)
