"""The pipeline of sequence parallelism between GPUs that access each other's memory: copies by the copy engines.

The steps are those of `messages.py`. The transfers run on a stream of their own, beside the products. Gathering: a rank
copies its rows into the memory of each other rank. Summing: a rank's products are written to its own memory, and the
next rank of the ring copies them from there to where it adds its own products. R ranks, [..., n, X] a rank's rows.
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
    """Gathering and summing through two slots of memory in turn, so that a transfer can begin before the last ends."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.rank, self.size = group.rank(), group.size()
        self.num_parts = self.size
        self.stream = torch.cuda.Stream(priority=-1)
        self._slots = cycle((Slot(group), Slot(group)))

    def _begin(self, num_bytes: int) -> Slot:
        """Begin a use of the next slot, for the work that follows on the current stream and on `stream`."""
        slot, current = next(self._slots), torch.cuda.current_stream()
        slot.begin(num_bytes, current)
        self.stream.wait_stream(current)
        return slot

    def gathering(self, *parts: Tensor, keep: bool) -> Arrival:
        """Start all copies."""
        return PeerArrival(self, parts, keep)

    def summing(
        self, partial: tuple[int, ...], like: Tensor, produce: Produce, fill: Callable[[], None] | None = None
    ) -> Tensor:
        """A ring; sums are rounded to the dtype of `like` at each rank."""
        size, length, dtype = self.size, partial[-2] // self.size, like.dtype
        total = like.new_empty((*partial[:-2], length, partial[-1]))
        own = flattened(total)
        pieces = pieces_of(*own.shape[:2])
        each = size_of(tuple(own.shape), dtype)
        slot, current = self._begin((size - 1) * each), torch.cuda.current_stream()
        before, after = (self.rank - 1) % size, (self.rank + 1) % size
        shape = tuple(own.shape)

        def sums(rank: int, step: int) -> Tensor:
            return slot.tensor(rank, shape, dtype, step * each)

        def arriving(step: int, target: Tensor) -> list[torch.cuda.Event]:
            """Start to copy the sums of the step before from the rank before, piece by piece."""
            events, source = [], sums(before, step - 1)
            with torch.cuda.stream(self.stream):
                for number, piece in enumerate(pieces):
                    slot.hear(self.stream, before, (step - 1) * len(pieces) + number)
                    target[piece].copy_(source[piece])
                    events.append(self.stream.record_event())
            return events

        for step in range(size - 1):
            leaving = sums(self.rank, step)
            arrived = arriving(step, leaving) if step else []
            for number, piece in enumerate(pieces):
                if step:
                    current.wait_event(arrived[number])
                produce(part_of(piece, (self.rank - 1 - step) % size, length), leaving[piece], step > 0)
                slot.tell(current, after, step * len(pieces) + number)
        arrived = arriving(size - 1, own)
        if fill is not None:
            fill()
        for piece, event in zip(pieces, arrived, strict=True):
            current.wait_event(event)
            produce(part_of(piece, self.rank, length), own[piece], True)
        slot.end(current)
        return total


class PeerArrival(Arrival):
    """Rows that the other ranks copy into this rank's memory, where they form the whole [B, R n, X]."""

    def __init__(self, peers: Peers, parts: tuple[Tensor, ...], keep: bool) -> None:
        self._peers, self._shapes = peers, [part.shape for part in parts]
        self._parts = [flattened(part.contiguous()) for part in parts]
        wholes = [(x.shape[0], peers.size * x.shape[1], x.shape[2]) for x in self._parts]
        sizes = [size_of(whole, x.dtype) for whole, x in zip(wholes, self._parts, strict=True)]
        slot = self._slot = peers._begin(sum(sizes))
        offsets = [sum(sizes[:number]) for number in range(len(sizes))]
        self._places = list(zip(wholes, (part.dtype for part in parts), offsets, strict=True))
        self._heard = {peers.rank}
        own = place_of(peers.rank, self._parts[0].shape[1])
        with torch.cuda.stream(peers.stream):
            for step in range(1, peers.size):
                to = (peers.rank + step) % peers.size
                for place, part in zip(self._places, self._parts, strict=True):
                    _copy(own.of(slot.tensor(to, *place)), part)
                slot.tell(peers.stream, to, 0)
            if keep:
                for place, part in zip(self._places, self._parts, strict=True):
                    _copy(own.of(slot.tensor(peers.rank, *place)), part)
            self._copied = peers.stream.record_event()

    def __iter__(self) -> Iterator[tuple[Rows, tuple[Tensor, ...]]]:
        """This rank's rows, then each other rank's."""
        peers, length = self._peers, self._parts[0].shape[1]
        yield place_of(peers.rank, length), tuple(self._parts)
        for step in range(1, peers.size):
            rank = (peers.rank - step) % peers.size
            rows = place_of(rank, length)
            self._hear(rank)
            yield rows, tuple(rows.of(whole) for whole in self._wholes())

    def whole(self) -> tuple[Tensor, ...]:
        """[..., R n, X], in the memory of the slot."""
        for step in range(1, self._peers.size):
            self._hear((self._peers.rank - step) % self._peers.size)
        torch.cuda.current_stream().wait_event(self._copied)
        wholes = zip(self._wholes(), self._shapes, strict=True)
        return tuple(whole.view(*shape[:-2], *whole.shape[-2:]) for whole, shape in wholes)

    def end(self) -> None:
        """The copies have ended, so the parts may be freed; and the slot may be used again."""
        current = torch.cuda.current_stream()
        for step in range(1, self._peers.size):
            self._hear((self._peers.rank - step) % self._peers.size)
        current.wait_event(self._copied)
        self._slot.end(current)

    def _wholes(self) -> list[Tensor]:
        return [self._slot.tensor(self._peers.rank, *place) for place in self._places]

    def _hear(self, rank: int) -> None:
        if rank not in self._heard:
            self._heard.add(rank)
            self._slot.hear(torch.cuda.current_stream(), rank, 0)
