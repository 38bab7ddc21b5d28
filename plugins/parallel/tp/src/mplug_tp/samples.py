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

from collections.abc import Callable, Iterator, Sequence
from itertools import cycle, pairwise

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


class Samples(ChunkedCollectives):
    """Gathering and summing in whole samples through two slots in turn; `single` has those of a single sample."""

    def __init__(self, group: dist.ProcessGroup, where: torch.device, single: ChunkedCollectives) -> None:
        self.rank, self.size = group.rank(), group.size()
        self.num_parts, self._single = self.size, single
        self.copies, self.signals = Lane(where), Lane(where)
        self._slots = cycle((ops.SignalledMemory(group), ops.SignalledMemory(group)))

    def next_slot(self) -> ops.SignalledMemory:
        """The slot for the next use."""
        return next(self._slots)

    def others(self) -> list[int]:
        """The other ranks, from the next one on."""
        return [(self.rank + step) % self.size for step in range(1, self.size)]

    def gathering(self, *parts: Tensor, keep: bool) -> Arrival:
        """Start all copies."""
        if parts[0][..., 0, 0].numel() == 1:
            return self._single.gathering(*parts, keep=keep)
        return SampleArrival(self, parts)

    def summing(
        self, partial: tuple[int, ...], like: Tensor, produce: Produce, fill: Callable[[], None] | None = None
    ) -> Tensor:
        """Sums of the ranks' products, which are rounded to the dtype of `like`; so is the sum, once."""
        total = like.new_empty((*partial[:-2], partial[-2] // self.size, partial[-1]))
        if total[..., 0, 0].numel() == 1:
            return self._single.summing(partial, like, produce, fill)
        products = like.new_empty((total[..., 0, 0].numel(), *partial[-2:]))
        sums = _Sums(self, flattened(total), products)
        for chunk in sums.chunks:
            produce(Rows(chunk, EVERYTHING), products[chunk], False)
            sums.send(chunk)
        if fill is not None:
            fill()
        sums.end()
        return total


class _Sums:
    """A use of a slot for products [B, R n, X] that become sums [B, n, X].

    The slot has room for what R - 1 ranks send, [R - 1, B, n, X]: first that of the rank before this one.
    """

    def __init__(self, samples: Samples, total: Tensor, products: Tensor) -> None:
        self._samples, self._total, self._products = samples, total, products
        self.chunks = leaving_chunks(len(total))
        self._slot, self._shape = samples.next_slot(), (samples.size - 1, *total.shape)
        self._slot.begin(ops.size_of(self._shape, total.dtype), samples.copies.stream)

    def _arrived(self, rank: int) -> Tensor:
        """The room in a rank's slot."""
        return self._slot.tensor(rank, self._shape, self._total.dtype, 0)

    def send(self, chunk: slice) -> None:
        """Copy the other ranks' rows of computed samples into their slots."""
        copies, length = self._samples.copies, self._total.shape[1]
        last = chunk.stop == len(self._total)
        with copies.entered():
            for number, to in enumerate(self._samples.others()):
                rows = place_of(to, length).of(self._products)
                copy_samples(self._arrived(to)[number, chunk], rows[chunk], copies.stream)
                if last or chunk == self.chunks[-2]:
                    self._slot.tell(copies.stream, to, int(last))

    def end(self) -> None:
        """Add what has arrived, and end the use: all samples but those of the last chunk, then these."""
        samples, own = self._samples, place_of(self._samples.rank, self._total.shape[1]).of(self._products)
        stop = self.chunks[-1].start
        for channel, chunk in enumerate((slice(0, stop), slice(stop, len(own)))):
            for of in samples.others():
                self._slot.hear(samples.signals.stream, of, channel)
            wait_for(samples.signals.mark())
            add_up(self._total[chunk], own[chunk], self._arrived(samples.rank)[:, chunk], samples.rank)
        wait_for(samples.copies.mark())  # the products may be freed
        with samples.signals.entered():
            self._slot.end(samples.signals.stream)


class SampleArrival(Arrival):
    """Rows that the other ranks copy into this rank's slot, where they form the whole [B, R n, X]."""

    def __init__(self, samples: Samples, parts: Sequence[Tensor]) -> None:
        self._samples, self._shapes = samples, [part.shape for part in parts]
        self._parts = [flattened(part.contiguous()) for part in parts]
        self._length, self._slot = self._parts[0].shape[1], samples.next_slot()
        self._chunks = arriving_chunks(len(self._parts[0]))
        places, start = [], 0
        for part in self._parts:
            shape = part.shape[0], samples.size * self._length, part.shape[2]
            places.append((shape, part.dtype, start))
            start += ops.size_of(shape, part.dtype)
        self._own = place_of(samples.rank, self._length)
        with samples.copies.entered():
            self._slot.begin(start, samples.copies.stream)
            self._send(places)
        self._wholes = [self._slot.tensor(samples.rank, *place) for place in places]
        current = torch.cuda.current_stream() if samples.copies.stream is not None else None
        for whole, part in zip(self._wholes, self._parts, strict=True):  # no other rank writes to own rows
            copy_samples(self._own.of(whole), part, current)

    def _send(self, places: list[tuple[tuple[int, ...], torch.dtype, int]]) -> None:
        copies = self._samples.copies
        for channel, chunk in enumerate(self._chunks):
            for to in self._samples.others():
                for part, place in zip(self._parts, places, strict=True):
                    rows = self._own.of(self._slot.tensor(to, *place))
                    copy_samples(rows[chunk], part[chunk], copies.stream)
                self._slot.tell(copies.stream, to, channel)
        self._sent = copies.mark()
        self._arrived = []
        for channel in range(len(self._chunks)):
            for of in self._samples.others():
                self._slot.hear(self._samples.signals.stream, of, channel)
            self._arrived.append(self._samples.signals.mark())

    def __iter__(self) -> Iterator[tuple[Rows, tuple[Tensor, ...]]]:
        """This rank's rows of the first sample, the others' rows of it, and then whole samples."""
        first, rest = self._chunks[0], self._chunks[1:]
        yield Rows(first, self._own.positions), tuple(part[first] for part in self._parts)
        wait_for(self._arrived[0])
        for positions in (slice(0, self._own.positions.start), slice(self._own.positions.stop, None)):
            rows = Rows(first, positions)
            if (found := tuple(map(rows.of, self._wholes)))[0].shape[1]:
                yield rows, found
        for chunk, event in zip(rest, self._arrived[1:], strict=True):
            wait_for(event)
            yield Rows(chunk, EVERYTHING), tuple(whole[chunk] for whole in self._wholes)

    def whole(self) -> tuple[Tensor, ...]:
        """[..., R n, X], in the memory of the slot."""
        for event in self._arrived:
            wait_for(event)
        pairs = zip(self._wholes, self._shapes, strict=True)
        return tuple(whole.view(*shape[:-2], *whole.shape[1:]) for whole, shape in pairs)

    def end(self) -> None:
        """End the use of the slot: the parts may be freed, and the others may write to the slot."""
        wait_for(self._sent)
        with self._samples.signals.entered():
            self._slot.end(self._samples.signals.stream)
