"""All-to-all of parts that the sender writes in place: by messages, or by copies between the memories of GPUs. R ranks.

NCCL exchanges with kernels, which need multiprocessors, and attention kernels may occupy all of them. The copy engines
of the GPUs need none, so that neither waits for the other.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import cycle
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

import mplug_ops as ops
from mplug import Run, UsageError
from mplug_ops.transfers import group_named, swapping

SETTING, REMEDY = "parallel.cp.transport=copy_engines", "use parallel.cp.transport=messages"
NUM_SLOTS = 4
"""Exchanges in flight: the arriving and the leaving one of a chunk, and those of its neighbour."""

Write = Callable[[Sequence[Tensor]], None]
"""Writes the part for each rank to its place [...]."""


class Coming(Protocol):
    """Parts on their way."""

    def wait(self) -> Tensor:
        """Let the current stream wait for the parts, and return them: [R, ...]."""


class Swaps(Protocol):
    """All-to-all among the ranks of a group."""

    def start(self, write: Write, arriving: Tensor) -> Coming:
        """Start to exchange: `write` writes the parts that leave, and arriving [R, ...] gets those of all ranks.

        Collective; all ranks start exchanges in the same order.
        """


class MessageSwaps:
    """Exchanges by messages of the group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def start(self, write: Write, arriving: Tensor) -> Coming:
        """See `Swaps`."""
        leaving = torch.empty_like(arriving)
        write(leaving.unbind())
        return swapping(leaving, self._group, arriving)


class CopySwaps:
    """Exchanges by copies: parts are written to own memory, from which the other ranks copy them, in several slots."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._rank, self._size = group.rank(), group.size()
        self._others = [(self._rank + step) % self._size for step in range(1, self._size)]
        self._slots = cycle([ops.SignalledMemory(group) for _ in range(NUM_SLOTS)])
        self._streams: dict[torch.device, tuple[torch.cuda.Stream, torch.cuda.Stream]] = {}

    def start(self, write: Write, arriving: Tensor) -> Coming:
        """See `Swaps`. This rank's part for itself is written to its place in `arriving`."""
        slot, signals, copies = next(self._slots), *self._streams_of(arriving)
        shape, dtype = tuple(arriving.shape[1:]), arriving.dtype
        each = ops.size_of(shape, dtype)
        slot.begin(self._size * each, signals)
        _let_wait(None, signals)
        places = [slot.tensor(self._rank, shape, dtype, rank * each) for rank in range(self._size)]
        places[self._rank] = arriving[self._rank]
        write(places)
        _let_wait(signals, None)
        _let_wait(copies, None)  # the memory of `arriving` is free from here on
        for other in self._others:
            slot.tell(signals, other, 0)
        with nullcontext() if copies is None else torch.cuda.stream(copies):
            for other in self._others:
                slot.hear(copies, other, 0)
                arriving[other].copy_(slot.tensor(other, shape, dtype, self._rank * each))
            slot.end(copies)
        return _Copied(arriving, None if copies is None else copies.record_event())

    def _streams_of(self, x: Tensor) -> tuple["torch.cuda.Stream | None", "torch.cuda.Stream | None"]:
        """The streams of signals and of copies; none on a CPU, where a wait blocks."""
        if not x.is_cuda:
            return None, None
        if x.device not in self._streams:
            self._streams[x.device] = torch.cuda.Stream(x.device, priority=-1), torch.cuda.Stream(x.device, priority=-1)
        return self._streams[x.device]


def _let_wait(stream: "torch.cuda.Stream | None", for_: "torch.cuda.Stream | None") -> None:
    """Let a stream wait for another one; None is the current stream. On a CPU both are None."""
    if stream is None and for_ is None:
        return
    current = torch.cuda.current_stream()
    (stream or current).wait_stream(for_ or current)


class _Copied:
    def __init__(self, arriving: Tensor, event: "torch.cuda.Event | None") -> None:
        self._arriving, self._event = arriving, event

    def wait(self) -> Tensor:
        """See `Coming`."""
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)
        return self._arriving


BY_COPIES: dict[str, CopySwaps] = {}
"""Names of groups whose ranks exchange by copies."""


def swaps_of(name: str) -> Swaps:
    """The exchange of the group with this name."""
    return BY_COPIES.get(name) or MessageSwaps(group_named(name))


def exchange_by_copies(run: Run, group: ops.Group) -> None:
    """Let the ranks of a group exchange by copies, or raise UsageError if they cannot. Collective."""
    if not run.device.startswith("cuda"):
        raise UsageError(f"{SETTING} copies between GPUs, and this run is on the CPU; {REMEDY}")
    BY_COPIES.clear()  # those of the layout before, whose memory nothing uses any more
    if group is None:
        return
    if not ops.reachable(group):
        ranks = ", ".join(map(str, dist.get_process_group_ranks(group)))
        raise UsageError(
            f"{SETTING} needs GPUs of one machine that may access each other's memory, and those of the ranks {ranks}, "
            f"which share a sequence, may not; {REMEDY}"
        )
    BY_COPIES[group.group_name] = CopySwaps(group)
