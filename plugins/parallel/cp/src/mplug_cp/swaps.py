"""All-to-all of heads: by messages, or by copies between the memories of GPUs.

B batch, S sequence, h heads of a chunk that a rank attends with, K head dim, R ranks.

NCCL exchanges with kernels, which need multiprocessors, and attention kernels may occupy all of them. The copy engines
of the GPUs need none, so that neither waits for the other. They copy only what is contiguous, so heads are packed:

    to the ranks that attend    heads for a rank are a strided part of a tensor: each rank packs them into its own
                                memory, from which the other ranks copy them into one tensor
    from them                   what a rank has computed for another one is contiguous: it is copied into the memory of
                                that rank, which puts the heads to their places
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import accumulate, cycle
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

import mplug_ops as ops
from mplug import Run, UsageError
from mplug_cp.exchange import HEADS
from mplug_ops.transfers import group_named, swapping
from mplug_ops.words import put

SETTING, REMEDY = "parallel.cp.transport=copy_engines", "use parallel.cp.transport=messages"
NUM_SLOTS = 2
"""Exchanges in flight in each direction: that of a chunk, and that of its neighbour."""


class Coming(Protocol):
    """Heads on their way to this rank, which attends."""

    def wait(self) -> Tensor:
        """Let the current stream wait for the heads, and return them: [R, B, S/R, sum of h, K]."""


class Leaving(Protocol):
    """Heads on their way back."""

    def arrived(self) -> AbstractContextManager[Sequence[Sequence[Tensor]]]:
        """A context with the tensors [B, S/R, h, K] of each rank, for each x; the current stream waits for them.

        They are valid within the context only.
        """


class Swaps(Protocol):
    """All-to-all among the ranks of a group. Collective; all ranks start exchanges in the same order."""

    def start(self, xs: Sequence[Tensor], arriving: Tensor) -> Coming:
        """Start to exchange xs [R, B, S/R, h, K]: `arriving` [R, B, S/R, sum of h, K] gets those of all ranks."""

    def give_back(self, xs: Sequence[Tensor]) -> Leaving:
        """Start to exchange xs [R, B, S/R, h, K]; they must not change before the tensors have arrived."""


def _pack(places: Sequence[Tensor], xs: Sequence[Tensor]) -> None:
    """Write xs [R, B, S/R, h, K], concatenated along heads, to a place [B, S/R, sum of h, K] for each rank."""
    for rank, place in enumerate(places):
        for part, x in zip(place.split([x.shape[1 + HEADS] for x in xs], dim=HEADS), xs, strict=True):
            put(part, x[rank])


class MessageSwaps:
    """Exchanges by messages of the group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def start(self, xs: Sequence[Tensor], arriving: Tensor) -> Coming:
        """See `Swaps`."""
        leaving = torch.empty_like(arriving)
        _pack(leaving.unbind(), xs)
        return swapping(leaving, self._group, arriving)

    def give_back(self, xs: Sequence[Tensor]) -> Leaving:
        """See `Swaps`."""
        heads = [x.shape[1 + HEADS] for x in xs]
        if len(xs) == 1:
            return _Sent(swapping(xs[0], self._group), heads)
        leaving = xs[0].new_empty(*xs[0].shape[: 1 + HEADS], sum(heads), xs[0].shape[-1])
        _pack(leaving.unbind(), xs)
        return _Sent(swapping(leaving, self._group), heads)


class _Sent:
    def __init__(self, coming: Coming, heads: list[int]) -> None:
        self._coming, self._heads = coming, heads

    @contextmanager
    def arrived(self) -> Iterator[Sequence[Sequence[Tensor]]]:
        """See `Leaving`."""
        yield [x.unbind() for x in self._coming.wait().split(self._heads, dim=1 + HEADS)]


class CopySwaps:
    """Exchanges by copies through memory that the ranks share, in several slots for each direction.

    Signals have a stream of their own, since a rank waits in it for the others before it may write.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._rank, self._size = group.rank(), group.size()
        self._others = [(self._rank + step) % self._size for step in range(1, self._size)]
        self._coming, self._leaving = (cycle([ops.SignalledMemory(group) for _ in range(NUM_SLOTS)]) for _ in range(2))
        self._streams: dict[torch.device, tuple[torch.cuda.Stream, torch.cuda.Stream]] = {}

    def start(self, xs: Sequence[Tensor], arriving: Tensor) -> Coming:
        """See `Swaps`. This rank's part for itself is written to its place in `arriving`."""
        slot, signals, copies = next(self._coming), *self._streams_of(arriving)
        shape, dtype = tuple(arriving.shape[1:]), arriving.dtype
        each = ops.size_of(shape, dtype)
        slot.begin(self._size * each, signals)
        _let_wait(None, signals)
        places = [slot.tensor(self._rank, shape, dtype, rank * each) for rank in range(self._size)]
        places[self._rank] = arriving[self._rank]
        _pack(places, xs)
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

    def give_back(self, xs: Sequence[Tensor]) -> Leaving:
        """See `Swaps`. A slot has the parts of rank 0 for this rank, for each x, then those of rank 1, and so on."""
        slot, signals, copies = next(self._leaving), *self._streams_of(xs[0])
        *starts, each = accumulate((ops.size_of(tuple(x.shape[1:]), x.dtype) for x in xs), initial=0)
        slot.begin(self._size * each, copies)
        _let_wait(copies, None)

        def place(rank: int, of: int, number: int) -> Tensor:
            """The memory of a rank for what a rank gives back to it."""
            x = xs[number]
            return slot.tensor(rank, tuple(x.shape[1:]), x.dtype, of * each + starts[number])

        with nullcontext() if copies is None else torch.cuda.stream(copies):
            for other in self._others:
                for number, x in enumerate(xs):
                    for to, sample in zip(place(other, self._rank, number), x[other], strict=True):
                        to.copy_(sample)  # contiguous
                slot.tell(copies, other, 0)
        parts = [
            [x[rank] if rank == self._rank else place(self._rank, rank, number) for rank in range(self._size)]
            for number, x in enumerate(xs)
        ]
        return _GivenBack(slot, parts, self._others, signals, None if copies is None else copies.record_event())

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


class _GivenBack:
    def __init__(
        self,
        slot: ops.SignalledMemory,
        parts: list[list[Tensor]],
        others: list[int],
        signals: "torch.cuda.Stream | None",
        copied: "torch.cuda.Event | None",
    ) -> None:
        self._slot, self._parts, self._others, self._signals, self._copied = slot, parts, others, signals, copied

    @contextmanager
    def arrived(self) -> Iterator[Sequence[Sequence[Tensor]]]:
        """See `Leaving`. This rank's own copies have ended too, so what they read may be freed."""
        for other in self._others:
            self._slot.hear(self._signals, other, 0)
        _let_wait(None, self._signals)
        if self._copied is not None:
            torch.cuda.current_stream().wait_event(self._copied)
        yield self._parts
        _let_wait(self._signals, None)
        self._slot.end(self._signals)


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
