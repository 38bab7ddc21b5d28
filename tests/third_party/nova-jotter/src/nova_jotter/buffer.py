"""A loader that walks through the windows in order and draws its samples from a buffer of the next ones."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from mplug import Loader, MicroBatch, UsageError
from nova_jotter import VOCAB_SIZE
from nova_jotter.windows import Windows


class BufferedLoader(Loader):
    """Sample n is drawn from a buffer of `capacity` windows, whose place the next window takes.

    An epoch ends with an empty buffer, so every window comes once. Every rank draws the whole global order, which costs
    no reading, and reads its own part of it. The state is where the walk is and what the buffer holds.
    """

    vocab_size = VOCAB_SIZE

    def __init__(
        self, windows: Windows, capacity: int, *, seed: int, shard: tuple[int, int], micro_batch_size: int
    ) -> None:
        self.windows, self.capacity, self.seed = windows, capacity, seed
        self.shard, self.micro_batch_size = shard, micro_batch_size
        self.samples_per_epoch = windows.count
        self.samples = self.next = 0
        self.buffer: list[int] = []

    def take(self, num_samples: int) -> Iterator[MicroBatch]:
        """This rank's part of the next `num_samples` global samples, in micro batches."""
        first, (index, count) = self.samples, self.shard
        drawn = [self._draw() for _ in range(num_samples)]
        start, stop = (num_samples * part // count for part in (index, index + 1))
        begins = range(start, stop, self.micro_batch_size)
        parts = [(begin, min(begin + self.micro_batch_size, stop)) for begin in begins]
        return (self.windows.read(range(first + b, first + e), drawn[b:e]) for b, e in parts)

    def _draw(self) -> int:
        """The window of the next sample."""
        if not self.buffer:
            self.next = 0
        upcoming = range(self.next, min(self.next + self.capacity - len(self.buffer), self.windows.count))
        self.buffer += upcoming
        self.next += len(upcoming)
        slot = int(np.random.default_rng([self.seed, self.samples]).integers(len(self.buffer)))
        self.buffer[slot], self.buffer[-1] = self.buffer[-1], self.buffer[slot]
        self.samples += 1
        return self.buffer.pop()

    def state_dict(self) -> dict[str, Any]:
        """How many samples have been drawn, which window comes next, and which ones wait in the buffer."""
        return {"samples": self.samples, "next": self.next, "buffer": torch.tensor(self.buffer, dtype=torch.int64)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with the very buffer."""
        if "buffer" not in state:
            raise UsageError("this run was shuffled without a buffer; resume it with data.shuffle_buffer=null")
        self.samples, self.next, self.buffer = state["samples"], state["next"], state["buffer"].tolist()
