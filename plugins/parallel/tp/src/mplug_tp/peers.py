"""The pipeline of sequence parallelism between GPUs that access each other's memory: copies by the copy engines.

The steps are those of `messages.py`. A rank puts what others read into a slot of its own memory, tells them, and copies
from theirs. Copies and signals have streams of their own: the stream of the products waits for events only, because a
signal in it would cost 4 us. R ranks, [..., n, X] a rank's rows.
"""

from collections.abc import Callable, Iterator
from itertools import cycle

import torch
import torch.distributed as dist
from torch import Tensor

from mplug.nn import Arrival, Pipeline, Produce, Rows
from mplug.nn.pipeline import flattened
from mplug_tp.memory import Slot, size_of
from mplug_tp.messages import part_of, pieces_of, place_of

MOST_COPIES = 16
"""Maximum number of contiguous copies for a strided one; more are done by a kernel."""


def _copy(target: Tensor, source: Tensor) -> None:
    """target [B, n, X] = source: contiguous copies, since a strided one would be a kernel beside the products."""
    if target.is_contiguous() or len(target) > MOST_COPIES:
        target.copy_(source)
        return
    for own, other in zip(target, source, strict=True):
        own.copy_(other)


class Peers(Pipeline):
    """Gathering and summing through two slots in turn: a use of one can begin before the last of the other ends."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.rank, self.size = group.rank(), group.size()
        self.num_parts = self.size
        self.copies, self.signals = torch.cuda.Stream(priority=-1), torch.cuda.Stream(priority=-1)
        self._slots = cycle((Slot(group), Slot(group)))

    def next_slot(self) -> Slot:
        """The slot for the next use."""
        return next(self._slots)

    def gathering(self, *parts: Tensor, keep: bool) -> Arrival:
        """Start all copies."""
        return PeerArrival(self, parts, keep)

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
        self._shape, self._each = tuple(own.shape), size_of(tuple(own.shape), own.dtype)
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
    """Rows that this rank copies from the others' memory into the whole [B, R n, X]."""

    def __init__(self, peers: Peers, parts: tuple[Tensor, ...], keep: bool) -> None:
        self._shapes, self._rank = [part.shape for part in parts], peers.rank
        self._parts = [flattened(part.contiguous()) for part in parts]
        self._wholes = [x.new_empty(x.shape[0], peers.size * x.shape[1], x.shape[2]) for x in self._parts]
        self._length = self._parts[0].shape[1]
        self._arrived: list[tuple[Rows, torch.cuda.Event]] = []
        peers.copies.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(peers.copies):
            self._exchange(peers)
            if keep:
                own = place_of(peers.rank, self._length)
                for whole, part in zip(self._wholes, self._parts, strict=True):
                    _copy(own.of(whole), part)
            self._done = peers.copies.record_event()

    def _exchange(self, peers: Peers) -> None:
        """Put the parts into a slot, and copy those of the other ranks, on the stream of copies."""
        slot, copies = peers.next_slot(), peers.copies
        sizes = [size_of(tuple(x.shape), x.dtype) for x in self._parts]
        places = [(tuple(x.shape), x.dtype, sum(sizes[:number])) for number, x in enumerate(self._parts)]
        slot.begin(sum(sizes), copies)
        for part, place in zip(self._parts, places, strict=True):
            slot.tensor(peers.rank, *place).copy_(part)
        for step in range(1, peers.size):
            slot.tell(copies, (peers.rank + step) % peers.size, 0)
        for step in range(1, peers.size):
            of = (peers.rank - step) % peers.size
            rows = place_of(of, self._length)
            slot.hear(copies, of, 0)
            for whole, place in zip(self._wholes, places, strict=True):
                _copy(rows.of(whole), slot.tensor(of, *place))
            self._arrived.append((rows, copies.record_event()))
        slot.end(copies)

    def __iter__(self) -> Iterator[tuple[Rows, tuple[Tensor, ...]]]:
        """This rank's rows, then each other rank's."""
        yield place_of(self._rank, self._length), tuple(self._parts)
        for rows, event in self._arrived:
            torch.cuda.current_stream().wait_event(event)
            yield rows, tuple(map(rows.of, self._wholes))

    def whole(self) -> tuple[Tensor, ...]:
        """[..., R n, X]."""
        self.end()
        wholes = zip(self._wholes, self._shapes, strict=True)
        return tuple(whole.view(*shape[:-2], *whole.shape[1:]) for whole, shape in wholes)

    def end(self) -> None:
        """Wait for the copies: from then on, the parts may be freed."""
        torch.cuda.current_stream().wait_event(self._done)
