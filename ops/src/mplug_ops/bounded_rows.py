"""All-to-all of rows in buffers of a fixed size: no shape depends on the data, so the CPU waits for nothing.

A rank has rows in E = R e bins; each rank of the group owns e consecutive bins. R ranks, e bins per rank, N rows to
send. Each rank has room for C rows on the way to each other rank; rows beyond that are lost, and counted. All ranks
must have the same C.

    function           forward                                          backward
    send_bounded       each row to the rank that owns its bin, there    the rows' gradients, returned to their senders
                       ordered by bin, within a bin by sender
    give_back_bounded  each row to its sender                           gradients, sent like the rows

Without lost rows, results and gradients are those of `send` and `give_back` (`mplug_ops.rows`), with other padding.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from mplug_ops.collectives import Group, all_to_all, exchange


class BoundedMeeting(NamedTuple):
    """The places of one exchange of rows, as `meet_bounded` returns them; tensors only, so that it can be traced.

    `counts` [e] int64: number of rows that this rank receives in each of its bins. `leaving` [R C]: for each place of
    the buffer that is sent, the number of its row, and in `filled` whether it has one. `place` [N]: for each row its
    place in that buffer, and in `sent` whether it has one. `order` [R C]: for each row by bin its place in the buffer
    that is received; `inverse` [R C]: the inverse permutation. `lost` []: number of this rank's rows without a place.
    """

    counts: Tensor
    leaving: Tensor
    filled: Tensor
    place: Tensor
    sent: Tensor
    order: Tensor
    inverse: Tensor
    lost: Tensor


def meet_bounded(counts: Tensor, num_rows: int, room: int, group: Group) -> BoundedMeeting:
    """Exchange the sizes of the rows to send: counts [R e] int64, the number of this rank's N rows in every bin."""
    assert group is not None
    of_ranks = counts.view(group.size(), -1)  # [R, e]
    received = all_to_all(of_ranks, group, 0, 0)
    sizes, slot = of_ranks.sum(dim=1), torch.arange(room, device=counts.device)
    ends = sizes.cumsum(0)
    starts = ends - sizes
    filled = (slot < sizes[:, None]).flatten()
    leaving = (starts[:, None] + slot).flatten().where(filled, 0)
    number = torch.arange(num_rows, device=counts.device)
    rank = torch.searchsorted(ends, number, right=True).clamp(max=group.size() - 1)
    offset = number - starts[rank]
    sent = offset < torch.minimum(sizes, torch.full_like(sizes, room))[rank]
    place = (rank * room + offset).where(sent, 0)
    upto = received.cumsum(1).clamp(max=room)  # [R, e]
    bins = torch.searchsorted(upto, slot.expand(group.size(), room).contiguous(), right=True)  # e: no row
    order = bins.flatten().sort(stable=True).indices
    inverse = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    own = upto.diff(dim=1, prepend=torch.zeros_like(upto[:, :1])).sum(dim=0)
    lost = (sizes - room).clamp(min=0).sum()
    return BoundedMeeting(own, leaving, filled, place, sent, order, inverse, lost)


def send_bounded(rows: Tensor, meeting: BoundedMeeting, group: Group) -> Tensor:
    """rows [N, D] ordered by bin -> the rows [R C, D] of all ranks in this rank's bins, ordered by bin, and padding."""
    return _picked(exchange(pack_bounded(rows, meeting), group, 0, 0), meeting.order, None, meeting.inverse, None)


def pack_bounded(rows: Tensor, meeting: BoundedMeeting) -> Tensor:
    """rows [N, D] ordered by bin -> the buffer [R C, D] that is sent: C places for each rank, the unused ones 0."""
    return _picked(rows, meeting.leaving, meeting.filled, meeting.place, meeting.sent)


def give_back_bounded(rows: Tensor, meeting: BoundedMeeting, group: Group) -> Tensor:
    """rows [R C, D] in the order of `send_bounded` -> this rank's own rows [N, D], ordered by bin; 0 for lost ones."""
    one = meeting
    return unpack_bounded(exchange(_picked(rows, one.inverse, None, one.order, None), group, 0, 0), one)


def unpack_bounded(arrived: Tensor, meeting: BoundedMeeting) -> Tensor:
    """The buffer [R C, D] that returns -> this rank's own rows [N, D], ordered by bin; 0 for lost ones."""
    return _picked(arrived, meeting.place, meeting.sent, meeting.leaving, meeting.filled)


def _picked(x: Tensor, index: Tensor, known: Tensor | None, back: Tensor, used: Tensor | None) -> Tensor:
    """x[index], 0 where not `known`; backward: grad[back], 0 where not `used`."""
    y: Tensor = _Picked.apply(x, index, known, back, used)  # type: ignore[no-untyped-call]
    return y


class _Picked(torch.autograd.Function):
    """y[i] = x[index[i]]; backward: grad_x[j] = grad_y[back[j]], because each row has at most one place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, known: Tensor | None, back: Tensor, used: Tensor | None) -> Tensor:
        ctx.save_for_backward(back, used)
        return _rows_at(x, index, known)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        return _rows_at(grad, *ctx.saved_tensors), None, None, None, None


def _rows_at(x: Tensor, index: Tensor, known: Tensor | None) -> Tensor:
    rows = x.index_select(0, index)
    return rows if known is None else torch.where(known[:, None], rows, 0)
