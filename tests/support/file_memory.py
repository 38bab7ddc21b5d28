"""A `SignalledMemory` for processes on one CPU, so that the users of the GPUs' one can be tested without a GPU."""

import os
import time
from tempfile import mkstemp
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import mplug_ops as ops
from mplug_ops.peer_memory import FINISHED, HEADER, SignalledMemory

PATIENCE = 60.0
"""Seconds after which a wait for another rank is an error."""


class FileMemory(SignalledMemory):
    """Files that all ranks of a group map. Words are read again and again; there are no streams.

    A wait without the signal that it needs raises AssertionError, as a GPU would hang.
    """

    def reserve(self, num_bytes: int) -> None:
        if num_bytes <= self.capacity:
            return
        size = HEADER + ops.size_of((num_bytes,), torch.uint8)
        number, path = mkstemp(prefix="mplug-test-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None)
        os.close(number)
        with open(path, "r+b") as file:
            file.truncate(size)
        paths: list[Any] = [None] * self.group.size()
        dist.all_gather_object(paths, path, group=self.group)
        self._files = [torch.from_file(one, shared=True, size=size, dtype=torch.uint8) for one in paths]
        dist.barrier(group=self.group)
        os.unlink(path)
        self.capacity, self.uses = size - HEADER, 0

    def tensor(self, rank: int, shape: tuple[int, ...], dtype: torch.dtype, offset: int) -> Tensor:
        start = HEADER + offset
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        return self._files[rank][start : start + num_bytes].view(dtype).view(shape)

    def begin(self, num_bytes: int, stream: None) -> None:  # type: ignore[override]
        assert not self.busy, "the memory has one use at a time"
        self.busy = True
        self.reserve(num_bytes)
        if self.uses:
            for rank in self._others:
                self._await(FINISHED, rank)
        self.uses += 1

    def end(self, stream: None) -> None:  # type: ignore[override]
        for rank in self._others:
            self._words(rank)[FINISHED, self._own] = self.uses
        self.busy = False

    def tell(self, stream: None, rank: int, channel: int) -> None:  # type: ignore[override]
        self._words(rank)[1 + channel, self._own] = self.uses

    def hear(self, stream: None, rank: int, channel: int) -> None:  # type: ignore[override]
        self._await(1 + channel, rank)

    def _await(self, channel: int, rank: int) -> None:
        word, end = self._words(self._own)[channel, rank], time.monotonic() + PATIENCE
        while int(word) < self.uses:
            assert time.monotonic() < end, f"rank {rank} has not signalled use {self.uses} on channel {channel}"
            time.sleep(1e-4)

    def _words(self, rank: int) -> Tensor:
        return self._files[rank][:HEADER].view(torch.int32).view(-1, self._size)


def install() -> None:
    """Let this process use it in the place of the GPUs' memory."""
    ops.SignalledMemory = FileMemory  # type: ignore[misc]
