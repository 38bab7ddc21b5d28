"""Where rows go that ranks write directly into the memory of the others, and where they come back to.

A rank has rows in E = R e bins, ordered by bin; each rank of the group owns e consecutive bins. R ranks, N rows of a
rank, M places for the rows that a rank receives. These are ordered by bin, within a bin by sender: so nothing has to be
put into an order afterwards. Rows beyond M places are lost, and counted. All ranks must have the same N and M.
"""

from typing import NamedTuple

import torch
from torch import Tensor

import mplug_ops as ops

NOWHERE = -1
"""The rank of a row that is not sent."""


class Places(NamedTuple):
    """The ways of one exchange; tensors only, so that it can be traced.

    `counts` [e] int64: number of rows that this rank receives in each of its bins. `rank` [N] int32 and `place` [N]
    int64: for each row of this rank, the rank that receives it (or NOWHERE), and the place there. `back_rank` [M] and
    `back_place` [M]: for each row that this rank receives, the rank that has sent it, and its number there. `lost` []:
    number of this rank's rows without a place.
    """

    counts: Tensor
    rank: Tensor
    place: Tensor
    back_rank: Tensor
    back_place: Tensor
    lost: Tensor


def meet(counts: Tensor, num_rows: int, num_places: int, group: ops.Group) -> Places:
    """Exchange the sizes of the rows to send: counts [E] int64, the number of this rank's N rows in every bin."""
    assert group is not None
    return places_of(ops.all_gather(counts[None], group, 0), group.rank(), num_rows, num_places)


def places_of(counts: Tensor, own: int, num_rows: int, num_places: int) -> Places:
    """The ways of rank `own`, from the counts [R, E] of all ranks."""
    size, bins = counts.shape
    each = bins // size
    ends = counts.cumsum(1)
    firsts = ends - counts  # [R, E]: the number of the first row of a bin among those of its sender
    starts = _starts(counts, size)  # [R, E]: the place of the first row of a sender in a bin
    number = torch.arange(num_rows, device=counts.device)
    # Not `ends[own]`: compiled by torch 2.11, `searchsorted` reads a view from the beginning of its memory, and so the
    # row of rank 0 (pytorch issue 182343).
    bin_of = torch.searchsorted(counts[own].cumsum(0), number, right=True)  # [N]; E for rows of no bin
    held = bin_of.clamp(max=bins - 1)
    place = starts[own][held] + number - firsts[own][held]
    is_sent = (bin_of < bins) & (place < num_places)
    rank = (held // each).where(is_sent, NOWHERE).to(torch.int32)
    lost = ((bin_of < bins) & ~is_sent).sum()
    received = counts[:, own * each : (own + 1) * each].t()  # [e, R]
    back_rank, back_place = _ways_back(received, firsts[:, own * each : (own + 1) * each].t(), num_places)
    upto = received.sum(dim=1).cumsum(0).clamp(max=num_places)
    own_counts = upto.diff(prepend=upto.new_zeros(1))
    return Places(own_counts, rank, place.where(is_sent, 0), back_rank, back_place, lost)


def _starts(counts: Tensor, size: int) -> Tensor:
    """counts [R, E] -> [R, E]: the place, on the rank of a bin, of the first row of each sender in the bin."""
    of_owner = counts.t().unflatten(0, (size, -1)).flatten(1)  # [R, e R]: the segments of the rows of each owner
    starts = of_owner.cumsum(1) - of_owner
    by_bin: Tensor = starts.unflatten(1, (-1, counts.shape[0])).flatten(0, 1)  # [E, R]
    return by_bin.t()


def _ways_back(received: Tensor, firsts: Tensor, num_places: int) -> tuple[Tensor, Tensor]:
    """received and firsts [e, R] -> for each place, the rank of its sender (or NOWHERE) and the row's number there."""
    lengths, size = received.flatten(), received.shape[1]
    ends = lengths.cumsum(0)
    place = torch.arange(num_places, device=received.device)
    segment = torch.searchsorted(ends, place, right=True)
    held = segment.clamp(max=len(ends) - 1)
    is_held = segment < len(ends)
    number = firsts.flatten()[held] + place - (ends - lengths)[held]
    return (held % size).where(is_held, NOWHERE).to(torch.int32), number.where(is_held, 0)
