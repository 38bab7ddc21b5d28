"""All-to-all of rows by kernels that write each row directly into the memory of the GPU that needs it.

N rows of a rank, M places for the rows that it receives, D width (`mplug_ep.places`).

    function          forward                                              backward
    send_pushed       each row to its place on the rank that owns its bin  the rows' gradients, to their senders
    give_back_pushed  each row to its sender                               gradients, sent like the rows

Without lost rows, results and gradients have the bits of `mplug_ops.send` and `give_back`, with other padding. No shape
depends on the data, so the CPU waits for nothing. The GPUs of a group wait for each other once in an exchange.
"""

from typing import Any

import torch
from torch import Tensor

import mplug_ops as ops
from mplug_ep.mailbox import MAILBOXES
from mplug_ep.places import Places
from mplug_nn import fake, operator


def send_pushed(rows: Tensor, places: Places, group: ops.Group) -> Tensor:
    """rows [N, D] ordered by bin -> the rows [M, D] of all ranks in this rank's bins, ordered by bin, and padding."""
    assert group is not None
    sent: Tensor = _Send.apply(rows, *_ways(places), group.group_name)  # type: ignore[no-untyped-call]
    return sent


def give_back_pushed(rows: Tensor, places: Places, group: ops.Group) -> Tensor:
    """rows [M, D] in the order of `send_pushed` -> this rank's own rows [N, D], ordered by bin; 0 for unsent ones."""
    assert group is not None
    own: Tensor = _GiveBack.apply(rows, *_ways(places), group.group_name)  # type: ignore[no-untyped-call]
    return own


def _ways(places: Places) -> tuple[Tensor, ...]:
    return places.rank, places.place, places.back_rank, places.back_place


class _Send(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, rank: Tensor, place: Tensor, back_rank: Tensor, back_place: Tensor, group: str):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(rank, back_rank, back_place)
        ctx.group = group
        return push_rows(rows, rank, place, None, back_rank.shape[0], group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rank, back_rank, back_place = ctx.saved_tensors
        return push_rows(grad, back_rank, back_place, rank, rank.shape[0], ctx.group), *[None] * 5


class _GiveBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, rank: Tensor, place: Tensor, back_rank: Tensor, back_place: Tensor, group: str):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(rank, place, back_rank)
        ctx.group = group
        return push_rows(rows, back_rank, back_place, rank, rank.shape[0], group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rank, place, back_rank = ctx.saved_tensors
        return push_rows(grad, rank, place, None, back_rank.shape[0], ctx.group), *[None] * 5


@operator("mplug_ep::push_rows")
def push_rows(rows: Tensor, rank: Tensor, place: Tensor, written: Tensor | None, num_places: int, group: str) -> Tensor:
    """rows [N, D] to place[n] of rank[n] -> the rows [num_places, D] that the ranks have written here.

    `written` [num_places]: not NOWHERE where a rank has written; other rows are 0. None: other rows are arbitrary.
    """
    mailbox = MAILBOXES[group]
    arrived = mailbox.exchange(rows.contiguous(), rank, place, num_places)
    return arrived.clone() if written is None else mailbox.take(arrived, written)


@fake("mplug_ep::push_rows")
def _(rows: Tensor, rank: Tensor, place: Tensor, written: Tensor | None, num_places: int, group: str) -> Tensor:
    return rows.new_empty(num_places, rows.shape[1])
