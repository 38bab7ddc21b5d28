"""Which intervals of a sequence each rank holds: the division of context parallelism for scans and convolutions.

A sequence is divided into equal intervals, each of them on one rank. A rank holds one or two, in sequence order: one
contiguous part, or the two chunks of a zigzag. Scans and convolutions pass states from interval to interval, so the
order of the ranks does not matter to them.
"""

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from mplug import Axis, Mesh
from mplug_cp.documents import clipped


@dataclass(frozen=True)
class Division:
    """`held[r]` are the numbers of the intervals of the r-th rank of a group; all ranks hold equally many."""

    held: tuple[tuple[int, ...], ...]

    @property
    def per_rank(self) -> int:
        """Intervals of a rank."""
        return len(self.held[0])

    @property
    def places(self) -> list[int]:
        """For each interval in sequence order, its place among those of all ranks, concatenated in rank order."""
        concatenated = [number for own in self.held for number in own]
        return [concatenated.index(number) for number in range(len(concatenated))]


def division(mesh: Mesh, rank: int, axes: list[str]) -> Division:
    """The division of the sequence among the group of a rank along mesh axes.

    Ranks hold one interval each if their parts are contiguous, else two, whose lengths are half of a part.
    """
    cutting = [axis for axis in mesh.views["dense"] if axis.name in axes]  # in the order in which entries are cut
    ranks, size = list(mesh.group(rank, *axes)), prod(axis.size for axis in cutting)
    halves = [_units(mesh, one, cutting, 2 * size) for one in ranks]  # a sequence of two units for each rank
    if all(first % 2 == 0 and second == first + 1 for first, second in halves):
        return Division(tuple((first // 2,) for first, _ in halves))
    return Division(tuple(halves))


def _units(mesh: Mesh, rank: int, cutting: list[Axis], length: int) -> tuple[int, ...]:
    """The indices of a dimension of this length that a rank holds."""
    held = list(range(length))
    for axis in cutting:
        parts = axis.entries["sequence"](len(held), axis.size, mesh.index(rank, axis.name))
        held = [held[place] for part in parts for place in part]
    return tuple(held)


def cut(x: Tensor, per_rank: int) -> Tensor:
    """A rank's part [B, S, ...] -> its intervals as samples [N B, S / N, ...], interval after interval."""
    intervals: Tensor = x.unflatten(1, (per_rank, -1)).transpose(0, 1).flatten(0, 1)
    return intervals


def joined(x: Tensor, per_rank: int) -> Tensor:
    """The inverse of `cut`."""
    part: Tensor = x.unflatten(0, (per_rank, -1)).transpose(0, 1).flatten(1, 2)
    return part


def lengths_of(lengths: Tensor | None, numbers: tuple[int, ...], length: int) -> Tensor | None:
    """The documents in intervals of `length` positions: lengths [B, M] -> [N B, M]; None stays None."""
    if lengths is None:
        return None
    spans = (range(number * length, (number + 1) * length) for number in numbers)
    return torch.cat([clipped(lengths, (span,)) for span in spans])


def distance_in_document(lengths: Tensor, position: int) -> Tensor:
    """How many positions before `position` are in its document: lengths [B, M] -> [B]."""
    ends = lengths.cumsum(dim=1)
    starts = torch.where(ends <= position, ends, 0).amax(dim=1)
    return position - starts
