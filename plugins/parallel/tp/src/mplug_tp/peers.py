"""Chunked collectives between GPUs that access each other's memory: copies by the copy engines.

The steps are those of `messages.py`. Gathering: a rank copies its rows into the slots of the others. Summing: a rank
computes into its own slot, and the next rank copies from there. Copies and signals have streams of their own: the
stream of the products waits for events only, because a signal in it would cost 4 us. R ranks, [..., n, X] the rows of
one.
"""

from collections.abc import Callable, Iterator
from itertools import cycle

import torch
import torch.distributed as dist
from torch import Tensor

import mplug_ops as ops
from mplug_nn import Arrival, ChunkedCollectives, Produce, Rows
from mplug_nn.chunked_collectives import flattened
from mplug_tp.messages import part_of, pieces_of, place_of

MOST_COPIES = 16
"""Maximum number of contiguous copies for a strided one; more are done by a kernel."""


def _copy(target: Tensor, source: Tensor) -> None:
    """target [B, n, X] = source: contiguous copies.

    Between GPUs, a strided copy would be a kernel beside the products. Within one it takes twice as long.
    """
    if target.is_contiguous() or len(target) > MOST_COPIES:
        target.copy_(source)
        return
    for own, other in zip(target, source, strict=True):
        own.copy_(other)


class Peers(ChunkedCollectives):
    """Gathering and summing through two slots in turn: a use of one can begin before the last of the other ends."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.rank, self.size = group.rank(), group.size()
        self.num_parts = self.size
        self.copies, self.signals = torch.cuda.Stream(priority=-1), torch.cuda.Stream(priority=-1)
        self._slots = cycle((ops.SignalledMemory(group), ops.SignalledMemory(group)))

    def next_slot(self) -> ops.SignalledMemory:
        """The slot for the next use."""
        return next(self._slots)

    def gathering(self, *parts: Tensor, keep: bool) -> Arrival:
        """Start all copies."""
        return PeerArrival(self, parts)

    def summing(
        self, partial: tuple[int, ...], like: Tensor, produce: Produce, fill: Callable[[], None] | None = None
    ) -> Tensor:
        """A ring; sums are rounded to the dtype of `like` at each rank."""
        length = partial[-2] // self.size
        total = like.new_empty((*partial[:-2], length, partial[-1]))
        ring = _Ring(self, flattened(total))
        for step in range(self.size - 1):
            arrived = ring.arriving(step, ring.sums(self.rank, step)) if step else None
            for number, piece in enumerate(ring.pieces):
                if arrived:
                    torch.cuda.current_stream().wait_event(arrived[number])
                rows = part_of(piece, (self.rank - 1 - step) % self.size, length)
                produce(rows, ring.sums(self.rank, step)[piece], step > 0)
                ring.tell(step, number)
        arrived = ring.arriving(self.size - 1, ring.own)
        if fill is not None:
            fill()
        for piece, event in zip(ring.pieces, arrived, strict=True):
            torch.cuda.current_stream().wait_event(event)
            produce(part_of(piece, self.rank, length), ring.own[piece], True)
        ring.end()
        return total


class _Ring:
    """A use of a slot for sums [B, n, X], one for each step but the last, whose sums are `own`."""

    def __init__(self, peers: Peers, own: Tensor) -> None:
        self.own, self.pieces, self._peers = own, pieces_of(*own.shape[:2]), peers
        self._shape, self._each = tuple(own.shape), ops.size_of(tuple(own.shape), own.dtype)
        self._before, self._after = (peers.rank - 1) % peers.size, (peers.rank + 1) % peers.size
        self._slot, current = peers.next_slot(), torch.cuda.current_stream()
        self._slot.begin((peers.size - 1) * self._each, peers.signals)
        current.wait_stream(peers.signals)
        peers.copies.wait_stream(current)  # the memory of `own` is free from here on

    def sums(self, rank: int, step: int) -> Tensor:
        """The sums of a step in a rank's memory."""
        return self._slot.tensor(rank, self._shape, self.own.dtype, step * self._each)

    def tell(self, step: int, number: int) -> None:
        """Tell the next rank that a piece is computed."""
        self._peers.signals.wait_stream(torch.cuda.current_stream())
        self._slot.tell(self._peers.signals, self._after, step * len(self.pieces) + number)

    def arriving(self, step: int, target: Tensor) -> list[torch.cuda.Event]:
        """Start to copy the rank before's sums of the step before, piece by piece; an event for each."""
        events, copies, source = [], self._peers.copies, self.sums(self._before, step - 1)
        with torch.cuda.stream(copies):
            for number, piece in enumerate(self.pieces):
                self._slot.hear(copies, self._before, (step - 1) * len(self.pieces) + number)
                target[piece].copy_(source[piece])
                events.append(copies.record_event())
        return events

    def end(self) -> None:
        """End the use."""
        self._peers.signals.wait_stream(torch.cuda.current_stream())
        self._slot.end(self._peers.signals)


class PeerArrival(Arrival):
    """Rows that the other ranks copy into this rank's slot, where they form the whole [B, R n, X].

    Only the copies between GPUs run beside the products: the copy engines make these. A copy within a GPU needs
    multiprocessors, so beside a product it would begin when the product ends, and delay what waits for it.
    """

    def __init__(self, peers: Peers, parts: tuple[Tensor, ...]) -> None:
        self._peers, self._shapes = peers, [part.shape for part in parts]
        self._parts = [flattened(part.contiguous()) for part in parts]
        self._own = place_of(peers.rank, self._parts[0].shape[1])
        self._arrived: list[tuple[Rows, torch.cuda.Event]] = []
        shapes = [(x.shape[0], peers.size * x.shape[1], x.shape[2]) for x in self._parts]
        sizes = [ops.size_of(shape, x.dtype) for shape, x in zip(shapes, self._parts, strict=True)]
        starts = [sum(sizes[:number]) for number in range(len(sizes))]
        places = [(shape, x.dtype, start) for shape, x, start in zip(shapes, self._parts, starts, strict=True)]
        self._slot = peers.next_slot()
        peers.copies.wait_stream(torch.cuda.current_stream())
        self._slot.begin(sum(sizes), peers.copies)
        self._wholes = [self._slot.tensor(peers.rank, *place) for place in places]
        with torch.cuda.stream(peers.copies):
            self._exchange(places)

    def _exchange(self, places: list[tuple[tuple[int, ...], torch.dtype, int]]) -> None:
        """Copy the parts into the others' slots, and hear of those that come."""
        peers, slot, copies = self._peers, self._slot, self._peers.copies
        for step in range(1, peers.size):
            to = (peers.rank + step) % peers.size
            for part, place in zip(self._parts, places, strict=True):
                _copy(self._own.of(slot.tensor(to, *place)), part)
            slot.tell(copies, to, 0)
        self._sent = copies.record_event()
        for step in range(1, peers.size):
            of = (peers.rank - step) % peers.size
            slot.hear(copies, of, 0)
            self._arrived.append((place_of(of, self._parts[0].shape[1]), copies.record_event()))

    def __iter__(self) -> Iterator[tuple[Rows, tuple[Tensor, ...]]]:
        """This rank's rows, then each other rank's."""
        yield self._own, tuple(self._parts)
        for rows, event in self._arrived:
            torch.cuda.current_stream().wait_event(event)
            yield rows, tuple(map(rows.of, self._wholes))

    def whole(self) -> tuple[Tensor, ...]:
        """[..., R n, X], in the memory of the slot."""
        for whole, part in zip(self._wholes, self._parts, strict=True):
            _copy(self._own.of(whole), part)
        for _, event in self._arrived:
            torch.cuda.current_stream().wait_event(event)
        return self._shaped(self._wholes)

    def kept(self) -> tuple[Tensor, ...]:
        """[..., R n, X]."""
        kept = [torch.empty_like(whole) for whole in self._wholes]
        for rows, arrived in self:
            for to, x in zip(kept, arrived, strict=True):
                _copy(rows.of(to), x)
        return self._shaped(kept)

    def end(self) -> None:
        """End the use of the slot: the parts may be freed, and the others may write to the slot."""
        torch.cuda.current_stream().wait_event(self._sent)
        self._peers.signals.wait_stream(torch.cuda.current_stream())
        self._slot.end(self._peers.signals)

    def _shaped(self, wholes: list[Tensor]) -> tuple[Tensor, ...]:
        return tuple(x.view(*shape[:-2], *x.shape[1:]) for x, shape in zip(wholes, self._shapes, strict=True))
