"""Pipeline schedules with two chunks per rank in the shape of a V: rank r has the chunks r and 2p - 1 - r.

The first and the last chunk belong to rank 0. p ranks, m micro batches; chunk 0 of a rank is the one that goes down.
"""

from functools import cache

from mplug_pp.schedules import F, I, W, refuse
from mplug_schedules import Action, Kind, Shape, Table, with_transfers


def v_shape(num_ranks: int) -> tuple[int, ...]:
    """The rank of each chunk: 0, 1, ..., p - 1, p - 1, ..., 1, 0."""
    return (*range(num_ranks), *reversed(range(num_ranks)))


class _Row:
    """Actions of a rank as they are added; each kind runs the micro batches of a chunk in order."""

    def __init__(self, rank: int, num_ranks: int) -> None:
        self.chunks = (rank, 2 * num_ranks - 1 - rank)
        self.forwards, self.backwards = [0, 0], [0, 0]
        self.actions: list[Action] = []
        self.delayed: list[Action] = []

    def add(self, *words: str) -> None:
        """Add actions by their words: 'F0' is the next forward of chunk 0, 'B1' a whole backward of chunk 1.

        'W0' is the oldest delayed weight gradient of chunk 0, 'W' the oldest one of both chunks.
        """
        for word in words:
            kind = Kind(word[0])
            if kind is W:
                chunks = self.chunks if word == "W" else (self.chunks[int(word[1])],)
                oldest = next(action for action in self.delayed if action.chunk in chunks)
                self.delayed.remove(oldest)
                self.actions.append(oldest)
                continue
            half, counts = int(word[1]), self.forwards if kind is F else self.backwards
            self.actions.append(Action(kind, counts[half], self.chunks[half]))
            counts[half] += 1
            if kind is I:
                self.delayed.append(self.actions[-1]._replace(kind=W))

    def kept(self, num_micro_batches: int) -> tuple[Action, ...]:
        """The row without surplus micro batches."""
        return tuple(action for action in self.actions if action.micro_batch < num_micro_batches)


@cache
def zb_v(shape: Shape) -> Table:
    """ZB-V (arXiv 2401.10241, section 6): no bubble if forward, input and weight gradients take equally long.

    A rank holds the activations of p micro batches, as rank 0 of 1F1B does.
    """
    refuse(shape, "zb-v", 2)
    p, m = shape.num_ranks, shape.num_micro_batches
    return with_transfers(tuple(_zb_v(rank, p, max(2 * p - 1, m)).kept(m) for rank in range(p)), v_shape(p))


def _zb_v(rank: int, p: int, n: int) -> _Row:
    row = _Row(rank, p)
    row.add(*["F0"] * (2 * (p - rank) - 1))
    row.add(*["F1", "F0"] * rank)
    row.add(*["F1", "I1", "W1"] * (p - rank))
    while row.forwards[1] < row.forwards[0] or row.forwards[0] < n:
        row.add(*["F0"] * (row.forwards[0] < n), "I0", "W0", "F1", "I1", "W1")
    row.add(*["I0", "I1"] * rank)
    row.add(*["I0", "W0"] * (p - rank))
    row.add(*["W1"] * rank, *["W0"] * rank)
    return row


@cache
def dualpipe_v(shape: Shape) -> Table:
    """The order of DualPipeV (github.com/deepseek-ai/DualPipe), without its overlap of two passes.

    A rank holds the activations of at most p + 1 micro batches. With less than 2p micro batches, it is that of 2p
    micro batches without the surplus.
    """
    refuse(shape, "dualpipe-v", 2)
    p, m = shape.num_ranks, shape.num_micro_batches
    return with_transfers(tuple(_dualpipe_v(rank, p, max(2 * p, m)).kept(m) for rank in range(p)), v_shape(p))


def _dualpipe_v(rank: int, p: int, n: int) -> _Row:
    row, below = _Row(rank, p), p - rank - 1
    row.add(*["F0"] * (2 * below))
    row.add(*["F0", "F1"] * (rank + 1))
    row.add(*["I1", "W", "F1"] * below)
    row.add(*["F0", "B1", "F1", "B0"] * (n - 2 * p + rank + 1))
    row.add(*["B1", "F1", "B0"] * below)
    last = [f"{{}}{half}" for _ in range(rank + 1) for half in (1, 0)]
    whole = 2 * ((rank + 1) // 2) + (rank % 2 == 0)  # the first half of them are whole, the others leave weights
    row.add(*(word.format("B" if place < whole else "I") for place, word in enumerate(last)))
    row.add(*["W", "I0"] * below)
    row.add(*["W"] * len(row.delayed))
    return row
