"""All-to-all of rows in data-dependent numbers (arXiv 2006.16668), which sends rows to the ranks that compute them.

A rank has rows in E = R e bins; each rank of the group owns e consecutive bins. R ranks, e bins per rank, N rows to
send, M rows received.

    function   forward                                          backward
    send       each row to the rank that owns its bin, there    the rows' gradients, returned to their senders
               ordered by bin, within a bin by sender
    give_back  each row to its sender                           gradients, sent like the rows

The sizes must be on the CPU before any row is sent: `meet` makes the CPU wait for the device, once. Rows after those of
the last bin are not sent. Their values are undefined in the results of `give_back` and of `send`'s backward.
"""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from mplug_ops.collectives import Group
from mplug_ops.operators import _group
from mplug_ops.waits import waiting


class Meeting(NamedTuple):
    """The sizes and orders of one exchange of rows, as `meet` returns them; tensors only, so that it can be traced.

    `counts` [e] int64: number of rows that this rank receives in each of its bins. `order` [M]: index of each row by
    bin among the rows as received; `inverse` [M]: the inverse permutation. `sizes` [2, R], on the CPU: number of rows
    sent to and received from each rank.
    """

    counts: Tensor
    order: Tensor
    inverse: Tensor
    sizes: Tensor


def meet(counts: Tensor, group: Group) -> Meeting:
    """Exchange the sizes of the rows to send: counts [R e] int64, the number of this rank's rows in every bin.

    This is the only function here in which the CPU waits for the device.
    """
    assert group is not None
    return Meeting(*_meet(counts, group.size(), group.group_name))


def send(rows: Tensor, meeting: Meeting, group: Group) -> Tensor:
    """rows [N, ...] ordered by bin -> the rows [M, ...] of all ranks in this rank's bins, ordered by bin."""
    assert group is not None
    sent: Tensor = _send(rows, *_way(meeting), group.group_name)
    return sent


def give_back(rows: Tensor, meeting: Meeting, num_rows: int, group: Group) -> Tensor:
    """rows [M, ...] in the order of `send` -> [num_rows, ...]; it begins with this rank's own rows, ordered by bin."""
    assert group is not None
    returned: Tensor = _give_back(rows, *_way(meeting), num_rows, group.group_name)
    return returned


class RowReturn(NamedTuple):
    """The way of rows back to the ranks for which others have computed them; tensors only, so that it can be traced.

    `leaving` [N]: the numbers of the rows that this rank sends, ordered by the receiving rank. In `meeting`, a bin is a
    segment of the rows that this rank receives.
    """

    leaving: Tensor
    meeting: Meeting


def bring_back(rows: Tensor, way: RowReturn, group: Group) -> Tensor:
    """rows [R, ...] that this rank has computed for the group -> its own rows [M, ...], which the group has computed.

    In backward, gradients take the opposite way; that of a row that no rank receives is 0.
    """
    return send(rows.index_select(0, way.leaving), way.meeting, group)


def _way(meeting: Meeting) -> tuple[Tensor, Tensor, Tensor, int]:
    return meeting.order, meeting.inverse, meeting.sizes, len(meeting.counts)


@torch.library.custom_op("mplug::meet", mutates_args=())
def _meet(counts: Tensor, size: int, group: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    sent = counts.view(size, -1)  # [R, e]
    received = torch.empty_like(sent)
    with waiting():
        dist.all_to_all_single(received, sent.contiguous(), group=_group(group))
    sizes = torch.stack((sent.sum(dim=1), received.sum(dim=1))).cpu()
    order, inverse = _orders(received, int(sizes[1].sum()))
    return received.sum(dim=0), order, inverse, sizes


@_meet.register_fake
def _(counts: Tensor, size: int, group: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    num_rows = torch.library.get_ctx().new_dynamic_size()
    order, inverse = counts.new_empty(num_rows), counts.new_empty(num_rows)
    return counts.new_empty(counts.shape[0] // size), order, inverse, counts.new_empty((2, size), device="cpu")


def _orders(received: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """received [R, e] -> (for rows by bin, their places [M] by sender; for rows by sender, their places [M] by bin)."""
    shift = _starts(received) - _starts(received.t()).t()  # [R, e]
    places = torch.arange(num_rows, device=received.device)
    by_bin, by_sender = (
        moved.flatten().repeat_interleave(rows.flatten(), output_size=num_rows)
        for moved, rows in ((shift.t(), received.t()), (shift, received))
    )
    return places + by_bin, places - by_sender


def _starts(lengths: Tensor) -> Tensor:
    """The start of each of consecutive segments of these lengths, in row-major order."""
    flat = lengths.flatten()
    return (flat.cumsum(0) - flat).view(lengths.shape)


@torch.library.custom_op("mplug::send_rows", mutates_args=())
def _send(rows: Tensor, order: Tensor, inverse: Tensor, sizes: Tensor, bins: int, group: str) -> Tensor:
    sent, received = sizes.tolist()
    arrived = rows.new_empty(len(order), *rows.shape[1:])
    with waiting():
        dist.all_to_all_single(arrived, rows[: sum(sent)].contiguous(), received, sent, group=_group(group))
    return arrived if bins == 1 else arrived.index_select(0, order)


@_send.register_fake
def _(rows: Tensor, order: Tensor, inverse: Tensor, sizes: Tensor, bins: int, group: str) -> Tensor:
    return rows.new_empty(order.shape[0], *rows.shape[1:])


@torch.library.custom_op("mplug::give_rows_back", mutates_args=())
def _give_back(
    rows: Tensor, order: Tensor, inverse: Tensor, sizes: Tensor, bins: int, num_rows: int, group: str
) -> Tensor:
    sent, received = sizes.tolist()
    own = rows.new_empty(num_rows, *rows.shape[1:])
    leaving = rows.contiguous() if bins == 1 else rows.index_select(0, inverse)
    with waiting():
        dist.all_to_all_single(own[: sum(sent)], leaving, sent, received, group=_group(group))
    return own


@_give_back.register_fake
def _(rows: Tensor, order: Tensor, inverse: Tensor, sizes: Tensor, bins: int, num_rows: int, group: str) -> Tensor:
    return rows.new_empty(num_rows, *rows.shape[1:])


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    rows, order, inverse, sizes, ctx.bins, *_ = inputs
    ctx.save_for_backward(order, inverse, sizes)
    ctx.num_rows, ctx.group = rows.shape[0], inputs[-1]


def _backward_of_send(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return _give_back(grad, *ctx.saved_tensors, ctx.bins, ctx.num_rows, ctx.group), *[None] * 5


def _backward_of_give_back(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return _send(grad, *ctx.saved_tensors, ctx.bins, ctx.group), *[None] * 6


_send.register_autograd(_backward_of_send, setup_context=_keep)
_give_back.register_autograd(_backward_of_give_back, setup_context=_keep)
