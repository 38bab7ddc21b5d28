"""Chunked collectives by messages of the process group: every backend, also between hosts.

R ranks; [..., n, X] are a rank's rows. Gathering: at step s = 1 ... R-1, rank r sends its rows to rank r + s and
receives those of rank r - s. Summing: a ring. At step s = 0 ... R-1, rank r computes the rows of rank r - 1 - s, adds
them to the sum that arrived from rank r - 1, and sends the sum to rank r + 1; the last step's rows are its own.
"""

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from mplug_nn import Arrival, ChunkedCollectives, Produce, Rows
from mplug_nn.chunked_collectives import flattened
from mplug_ops import Group
from mplug_ops.transfers import Transfer, summing_all

EVERYTHING = slice(None)


def pieces_of(samples: int, positions: int) -> list[tuple[slice, slice]]:
    """Two halves (samples, positions) of a rank's rows [B, n]: while one is computed, the other travels."""
    if samples > 1:
        half = samples // 2
        return [(slice(0, half), slice(0, positions)), (slice(half, samples), slice(0, positions))]
    half = positions // 2
    return [(slice(0, 1), slice(low, high)) for low, high in ((0, half), (half, positions)) if high > low]


def place_of(rank: int, length: int) -> Rows:
    """The rows of a rank in the whole."""
    return Rows(EVERYTHING, slice(rank * length, (rank + 1) * length))


def part_of(piece: tuple[slice, slice], rank: int, length: int) -> Rows:
    """The rows in the whole of a piece of a rank's rows."""
    samples, positions = piece
    return Rows(samples, slice(rank * length + positions.start, rank * length + positions.stop))


def _bytes(x: Tensor) -> Tensor:
    """A contiguous tensor as bytes: not every backend sends every dtype."""
    return x.view(-1).view(torch.uint8)


def exchanged(sent: list[Tensor], arriving: list[Tensor], to: int, of: int, group: dist.ProcessGroup) -> Transfer:
    """Start to send contiguous tensors to rank `to` of the group, and to receive others from rank `of`."""
    to, of = dist.get_global_rank(group, to), dist.get_global_rank(group, of)
    pairs = [dist.P2POp(dist.isend, _bytes(x), to, group) for x in sent]
    pairs += [dist.P2POp(dist.irecv, _bytes(x), of, group) for x in arriving]
    return Transfer(arriving[0], dist.batch_isend_irecv(pairs), sent[0])


class MessageArrival(Arrival):
    """Rows that arrive as messages, a step for each other rank, in the whole [B, R n, X]: a message per sample."""

    def __init__(self, parts: tuple[Tensor, ...], group: dist.ProcessGroup) -> None:
        self._rank, size = group.rank(), group.size()
        self._shapes = [part.shape for part in parts]
        self._parts = [flattened(part.contiguous()) for part in parts]
        self._length = self._parts[0].shape[1]
        self._wholes = [x.new_empty(x.shape[0], size * x.shape[1], x.shape[2]) for x in self._parts]
        self._coming: list[tuple[Rows, Transfer]] = []
        sent = [sample for part in self._parts for sample in part]
        for step in range(1, size):
            to, of = (self._rank + step) % size, (self._rank - step) % size
            rows = place_of(of, self._length)
            arriving = [sample for whole in self._wholes for sample in rows.of(whole)]
            self._coming.append((rows, exchanged(sent, arriving, to, of, group)))

    def __iter__(self) -> Iterator[tuple[Rows, tuple[Tensor, ...]]]:
        """This rank's rows, then each other rank's."""
        yield place_of(self._rank, self._length), tuple(self._parts)
        for rows, transfer in self._coming:
            transfer.wait()
            yield rows, tuple(map(rows.of, self._wholes))

    def whole(self) -> tuple[Tensor, ...]:
        """[..., R n, X]."""
        self.end()
        for whole, part in zip(self._wholes, self._parts, strict=True):
            place_of(self._rank, self._length).of(whole).copy_(part)
        return tuple(
            whole.view(*shape[:-2], *whole.shape[1:]) for whole, shape in zip(self._wholes, self._shapes, strict=True)
        )

    def kept(self) -> tuple[Tensor, ...]:
        """[..., R n, X]: the memory is this arrival's own."""
        return self.whole()

    def end(self) -> None:
        """Wait for the transfers that were not waited for: from then on, the sent tensors may be freed."""
        for _, transfer in self._coming:
            transfer.wait()


class Messages(ChunkedCollectives):
    """The collectives of sequence parallelism: transfers between two ranks of the process group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group, self.num_parts = group, group.size()

    def gathering(self, *parts: Tensor, keep: bool) -> Arrival:
        """Start all transfers."""
        return MessageArrival(parts, self._group)

    def summing(
        self, partial: tuple[int, ...], like: Tensor, produce: Produce, fill: Callable[[], None] | None = None
    ) -> Tensor:
        """A ring; sums are rounded to the dtype of `like` at each rank."""
        group = self._group
        rank, size = group.rank(), group.size()
        length = partial[-2] // size
        total = like.new_empty((*partial[:-2], length, partial[-1]))
        pieces = pieces_of(total[..., 0, 0].numel(), length)
        coming: list[Transfer] = []
        for step in range(size - 1):
            of, going = (rank - 1 - step) % size, []
            for number, piece in enumerate(pieces):
                rows = part_of(piece, of, length)
                own = flattened(total)[piece]
                leaving = coming[number].wait() if step else torch.empty_like(own)
                produce(rows, leaving, step > 0)
                arriving = own if step == size - 2 else torch.empty_like(own)
                going.append(exchanged([leaving], [arriving], (rank + 1) % size, (rank - 1) % size, group))
            coming = going
        if fill is not None:
            fill()
        for piece, transfer in zip(pieces, coming, strict=True):
            produce(part_of(piece, rank, length), transfer.wait(), True)
        return total


class WholeArrival(Arrival):
    """Tensors that are whole on every rank."""

    def __init__(self, parts: tuple[Tensor, ...]) -> None:
        self._parts = tuple(part.contiguous() for part in parts)

    def __iter__(self) -> Iterator[tuple[Rows, tuple[Tensor, ...]]]:
        """All rows at once."""
        yield Rows(EVERYTHING, EVERYTHING), tuple(map(flattened, self._parts))

    def whole(self) -> tuple[Tensor, ...]:
        """The tensors themselves."""
        return self._parts


class AllReduces(ChunkedCollectives):
    """The collectives without sequence parallelism: nothing is gathered; sums are all-reduced, in two pieces.

    Without a group, a sum is this rank's product.
    """

    num_parts = 1

    def __init__(self, group: Group) -> None:
        self._group = group

    def gathering(self, *parts: Tensor, keep: bool) -> Arrival:
        """The parts are whole already."""
        return WholeArrival(parts)

    def summing(
        self, partial: tuple[int, ...], like: Tensor, produce: Produce, fill: Callable[[], None] | None = None
    ) -> Tensor:
        """The sum [..., n, X] of all rows: every rank has the whole."""
        total, works = like.new_empty(partial), []
        for samples, positions in pieces_of(total[..., 0, 0].numel(), partial[-2]):
            piece = flattened(total)[samples, positions]
            produce(Rows(samples, positions), piece, False)
            if self._group is not None:
                works.append(summing_all(piece, self._group))
        if fill is not None:
            fill()
        for work in works:
            work.wait()
        return total
