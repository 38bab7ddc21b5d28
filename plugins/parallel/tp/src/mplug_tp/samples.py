"""Chunked collectives between GPUs that access each other's memory, in whole samples: fewer and larger products.

`peers.py` divides a tensor [B, R n, X] into the rows of each rank. With many ranks this makes many small products and
copies, and the CPU may launch them more slowly than the GPUs compute them. Here a chunk is whole samples [b, R n, X]:

    gathering    a rank copies its rows of these samples into the memory of the others. The first chunk is the rows of
                 the first sample: this rank's while the others' arrive.
    summing      a rank computes these samples, and copies the rows of each other rank into the memory of that rank,
                 which adds what it computed itself and what arrived, once: no product adds to a sum.

Copies and signals have streams of their own. Every wait on a rank is for what another rank launched before in the order
of the program, so ranks cannot wait for each other. R ranks, n rows of a rank, B samples.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from itertools import accumulate, cycle, pairwise
from math import prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

import mplug_ops as ops
from mplug_nn import Arrival, ChunkedCollectives, Produce, Rows
from mplug_nn.chunked_collectives import flattened
from mplug_ops.lanes import Lane, wait_for
from mplug_ops.peer_copies import copy_samples
from mplug_tp.messages import EVERYTHING, place_of
from mplug_tp.sums import add_up


def arriving_chunks(samples: int) -> list[slice]:
    """Samples that are gathered together: one, another one, and twice as many in each further chunk.

    The products of all chunks before a chunk hide its transfer, if those of a sample hide that of a sample.
    """
    ends = [0, 1]
    while ends[-1] < samples:
        ends.append(min(2 * ends[-1], samples))
    return [slice(*pair) for pair in pairwise(ends)]


def leaving_chunks(samples: int) -> list[slice]:
    """Samples that are computed and sent together: the first, so that transfers begin early; the middle; the last.

    Nothing but `fill` hides the transfer of the last one.
    """
    ends = sorted({0, 1, samples - 1, samples})
    return [slice(*pair) for pair in pairwise(ends)]


class _Slot:
    """Memory of all ranks, with the views of it that uses of the same shapes need.

    Making views would take the CPU longer than launching the copies.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.memory = ops.SignalledMemory(group)
        self._capacity, self._views = 0, dict[Hashable, Any]()

    def views(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """What `make` returns, made once for a key, and again when the memory has grown."""
        if self.memory.capacity != self._capacity:
            self._capacity, self._views = self.memory.capacity, {}
        if key not in self._views:
            self._views[key] = make()
        return self._views[key]


class Samples(ChunkedCollectives):
    """Gathering and summing in whole samples through two slots in turn; `single` has those of a single sample."""

    def __init__(self, group: dist.ProcessGroup, where: torch.device, single: ChunkedCollectives) -> None:
        self.rank, self.size = group.rank(), group.size()
        self.others = [(self.rank + step) % self.size for step in range(1, self.size)]
        self.num_parts, self._single = self.size, single
        self.copies, self.signals = Lane(where), Lane(where)
        self._slots = cycle((_Slot(group), _Slot(group)))

    def next_slot(self) -> _Slot:
        """The slot for the next use."""
        return next(self._slots)

    def gathering(self, *parts: Tensor, keep: bool) -> Arrival:
        """Start all copies."""
        if parts[0].numel() == parts[0].shape[-2] * parts[0].shape[-1]:
            return self._single.gathering(*parts, keep=keep)
        return SampleArrival(self, parts)

    def summing(
        self, partial: tuple[int, ...], like: Tensor, produce: Produce, fill: Callable[[], None] | None = None
    ) -> Tensor:
        """Sums of the ranks' products, which are rounded to the dtype of `like`; so is the sum, once."""
        if (samples := prod(partial[:-2])) == 1:
            return self._single.summing(partial, like, produce, fill)
        total = like.new_empty((*partial[:-2], partial[-2] // self.size, partial[-1]))
        sums = _Sums(self, flattened(total), like.new_empty((samples, *partial[-2:])))
        for number, chunk in enumerate(sums.chunks):
            products = sums.products[chunk]
            produce(Rows(chunk, EVERYTHING), products, False)
            sums.send(number, products)
        if fill is not None:
            fill()
        sums.end()
        return total


class _Sums:
    """A use of a slot for `products` [B, R n, X] that become sums, total [B, n, X].

    The slot has room for what R - 1 ranks send, [R - 1, B, n, X]: first that of the rank before this one. A rank
    signals twice: when all samples but those of the last chunk are sent, and when these are.
    """

    def __init__(self, samples: Samples, total: Tensor, products: Tensor) -> None:
        self._samples, self._total, self.products = samples, total, products
        self.chunks, self._slot = leaving_chunks(len(total)), samples.next_slot()
        shape, dtype = (samples.size - 1, *total.shape), total.dtype
        self._slot.memory.begin(ops.size_of(shape, dtype), samples.copies.stream)
        self._targets, self._arrived = self._slot.views(("sums", shape, dtype), lambda: self._views(shape, dtype))

    def _views(self, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[list[list[Tensor]], list[Tensor]]:
        """(the places of a chunk in the memory of each other rank, what arrives before each signal)."""
        memory, last = self._slot.memory, self.chunks[-1]
        rooms = [memory.tensor(rank, shape, dtype, 0)[number] for number, rank in enumerate(self._samples.others)]
        own = memory.tensor(self._samples.rank, shape, dtype, 0)
        return [[room[chunk] for room in rooms] for chunk in self.chunks], [own[:, : last.start], own[:, last]]

    def send(self, number: int, products: Tensor) -> None:
        """Copy the other ranks' rows of the products of a chunk into their slots."""
        copies, length = self._samples.copies, self._total.shape[1]
        channel = number - len(self.chunks) + 2  # of the signal that these copies complete, if it is not negative
        with copies.entered():
            for to, target in zip(self._samples.others, self._targets[number], strict=True):
                copy_samples(target, products.narrow(1, to * length, length), copies.stream)
                if channel >= 0:
                    self._slot.memory.tell(copies.stream, to, channel)

    def end(self) -> None:
        """Add what has arrived, signal by signal, and end the use."""
        samples, signals, start = self._samples, self._samples.signals, self.chunks[-1].start
        own = self.products.narrow(1, samples.rank * self._total.shape[1], self._total.shape[1])
        for channel, chunk in enumerate((slice(0, start), slice(start, None))):
            for of in samples.others:
                self._slot.memory.hear(signals.stream, of, channel)
            wait_for(signals.mark())
            add_up(self._total[chunk], own[chunk], self._arrived[channel], samples.rank)
        wait_for(samples.copies.mark())  # the products may be freed
        signals.follow()
        self._slot.memory.end(signals.stream)


class _Places(NamedTuple):
    """The views of a slot that a gathering needs. A tuple of tensors has one for each part."""

    wholes: tuple[Tensor, ...]
    own: tuple[Tensor, ...]
    """This rank's rows of the wholes."""
    targets: list[list[list[Tensor]]]
    """For each chunk and each other rank: this rank's rows of the chunk in the memory of that rank."""
    arriving: list[list[tuple[Rows, tuple[Tensor, ...]]]]
    """For each chunk: the rows that it completes."""


class SampleArrival(Arrival):
    """Rows that the other ranks copy into this rank's slot, where they form the whole [B, R n, X]."""

    def __init__(self, samples: Samples, parts: Sequence[Tensor]) -> None:
        self._samples, self._shapes = samples, [part.shape for part in parts]
        self._parts = [flattened(part.contiguous()) for part in parts]
        self._chunks, self._slot = arriving_chunks(len(self._parts[0])), samples.next_slot()
        self._rows = place_of(samples.rank, self._parts[0].shape[1])
        shapes = [(x.shape[0], samples.size * x.shape[1], x.shape[2]) for x in self._parts]
        sizes = [ops.size_of(shape, x.dtype) for shape, x in zip(shapes, self._parts, strict=True)]
        kinds = tuple((shape, x.dtype) for shape, x in zip(shapes, self._parts, strict=True))
        with samples.copies.entered():
            self._slot.memory.begin(sum(sizes), samples.copies.stream)
            self._places: _Places = self._slot.views(kinds, lambda: self._views(kinds, sizes))
            self._send()
        current = torch.cuda.current_stream() if samples.copies.stream is not None else None
        for own, part in zip(self._places.own, self._parts, strict=True):  # no other rank writes to own rows
            copy_samples(own, part, current)

    def _views(self, kinds: tuple[tuple[tuple[int, ...], torch.dtype], ...], sizes: list[int]) -> _Places:
        def wholes_of(rank: int) -> tuple[Tensor, ...]:
            starts = accumulate(sizes, initial=0)
            return tuple(
                self._slot.memory.tensor(rank, *kind, start) for kind, start in zip(kinds, starts, strict=False)
            )

        whole, first, own = wholes_of(self._samples.rank), self._chunks[0], self._rows
        there = [list(map(own.of, wholes_of(rank))) for rank in self._samples.others]
        targets = [[[rows[chunk] for rows in of_rank] for of_rank in there] for chunk in self._chunks]
        around = (slice(0, own.positions.start), slice(own.positions.stop, whole[0].shape[1]))
        arriving = [[Rows(first, positions) for positions in around if positions.start < positions.stop]]
        arriving += [[Rows(chunk, EVERYTHING)] for chunk in self._chunks[1:]]
        found = [[(rows, tuple(map(rows.of, whole))) for rows in of_chunk] for of_chunk in arriving]
        return _Places(whole, tuple(map(own.of, whole)), targets, found)

    def _send(self) -> None:
        """Copy the parts into the others' slots, and hear of those that come."""
        copies, signals, memory = self._samples.copies, self._samples.signals, self._slot.memory
        for channel, chunk in enumerate(self._chunks):
            sources = [part[chunk] for part in self._parts]
            for to, targets in zip(self._samples.others, self._places.targets[channel], strict=True):
                for target, source in zip(targets, sources, strict=True):
                    copy_samples(target, source, copies.stream)
                memory.tell(copies.stream, to, channel)
        self._sent, self._arrived = copies.mark(), list[torch.cuda.Event | None]()
        for channel in range(len(self._chunks)):
            for of in self._samples.others:
                memory.hear(signals.stream, of, channel)
            self._arrived.append(signals.mark())

    def __iter__(self) -> Iterator[tuple[Rows, tuple[Tensor, ...]]]:
        """This rank's rows of the first sample, the others' rows of it, and then whole samples."""
        first = self._chunks[0]
        yield Rows(first, self._rows.positions), tuple(part[first] for part in self._parts)
        for event, arriving in zip(self._arrived, self._places.arriving, strict=True):
            wait_for(event)
            yield from arriving

    def whole(self) -> tuple[Tensor, ...]:
        """[..., R n, X], in the memory of the slot."""
        wait_for(self._arrived[-1])
        pairs = zip(self._places.wholes, self._shapes, strict=True)
        return tuple(whole.view(*shape[:-2], *whole.shape[1:]) for whole, shape in pairs)

    def end(self) -> None:
        """End the use of the slot: the parts may be freed, and the others may write to the slot."""
        wait_for(self._sent)
        self._samples.signals.follow()
        self._slot.memory.end(self._samples.signals.stream)
