"""Sums of gradients by copies: each rank copies its gradients of rows into the memory of the rank that keeps the rows.

That rank adds what arrives. NCCL sums with kernels that hold multiprocessors while they wait for each other. Here, only
the additions take multiprocessors from the products. R ranks.
"""

from collections.abc import Iterable, Sequence
from itertools import accumulate, cycle
from typing import TYPE_CHECKING

import torch
from torch import Tensor

import mplug_ops as ops
from mplug_ops.lanes import Lane

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

NUM_SLOTS = 2
"""Sums in flight: that of a unit, and that of the unit before it."""


class PeerSums:
    """Reduce-scatter of the gradients of a unit, on the stream of a lane."""

    def __init__(self, group: "ProcessGroup", lane: Lane) -> None:
        self._rank, self._size, self._lane = group.rank(), group.size(), lane
        self._slots = cycle([ops.SignalledMemory(group) for _ in range(NUM_SLOTS)])
        self._num_bytes = 0

    def make_room(self, rows: Iterable[tuple[int, ...]], dtype: torch.dtype) -> None:
        """Let the memory suffice for rows of these shapes; all ranks make the same room before the first sum."""
        each = sum(ops.size_of(tuple(shape), dtype) for shape in rows)
        self._num_bytes = max(self._num_bytes, (self._size - 1) * each)

    def sum_each(self, totals: Sequence[Tensor], parts: Sequence[Tensor]) -> None:
        """Each total [n] of rank r becomes the sum over the ranks, in their order, of row r of a part [R, n].

        It is computed in the dtype of the totals. A total may be the row itself. Collective, in the same order on all
        ranks; it is called within the lane.
        """
        slot, stream = next(self._slots), self._lane.stream
        sizes = (ops.size_of(tuple(part.shape[1:]), part.dtype) for part in parts)
        *starts, each = accumulate(sizes, initial=0)
        slot.begin(self._num_bytes, stream)

        def place(rank: int, step: int, number: int) -> Tensor:
            """The memory of a rank for what the rank `step` places before it sends."""
            part = parts[number]
            return slot.tensor(rank, tuple(part.shape[1:]), part.dtype, (step - 1) * each + starts[number])

        for step in range(1, self._size):
            to = (self._rank + step) % self._size
            for number, part in enumerate(parts):
                place(to, step, number).copy_(part[to])
            slot.tell(stream, to, 0)
        for step in range(1, self._size):
            slot.hear(stream, (self._rank - step) % self._size, 0)
        for number, (total, part) in enumerate(zip(totals, parts, strict=True)):
            terms = [
                part[rank] if rank == self._rank else place(self._rank, (self._rank - rank) % self._size, number)
                for rank in range(self._size)
            ]
            _add(total, terms)
        slot.end(stream)


def _add(total: Tensor, terms: Sequence[Tensor]) -> None:
    """total [n] = the sum of the terms [n], each addition in the dtype of total, which may be the memory of a term."""
    first, second, *others = (term.to(total.dtype) for term in terms)
    if not others:
        torch.add(first, second, out=total)
        return
    found = first + second
    for term in others:
        found += term
    total.copy_(found)
