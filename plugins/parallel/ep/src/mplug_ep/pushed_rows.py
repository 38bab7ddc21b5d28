"""All-to-all of rows by kernels that write each row directly into the memory of the GPU that needs it.

N rows of a rank, M places for the rows that it receives, D width (`mplug_ep.places`).

    function          forward                                              backward
    send_pushed       each row to its place on the rank that owns its bin  the rows' gradients, to their senders
    give_back_pushed  each row to its sender                               gradients, sent like the rows

Each function is also there in two parts, between which a rank computes something else (as in `mplug_ops.started_rows`):

    depart_pushed, depart_back_pushed   start to write rows            await their gradients
    arrive_pushed, arrive_back_pushed   await the rows                 start to write their gradients

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


def depart_pushed(rows: Tensor, places: Places, group: ops.Group) -> tuple[Tensor, Tensor]:
    """Start `send_pushed` -> (the rows, for `arrive_pushed`; the rows that arrive, undefined until then)."""
    assert group is not None
    leaving: Tensor = _Leaving.apply(rows, places.rank, group.group_name)  # type: ignore[no-untyped-call]
    num_places = places.back_rank.shape[0]
    return leaving, start_push(leaving.detach(), places.rank, places.place, num_places, group.group_name, False)


def arrive_pushed(leaving: Tensor, arriving: Tensor, places: Places, group: ops.Group) -> Tensor:
    """Await the rows of `depart_pushed`."""
    assert group is not None
    back = places.back_rank, places.back_place, False, group.group_name
    arrived: Tensor = _Awaited.apply(leaving, arriving, *back)  # type: ignore[no-untyped-call]
    return arrived


def depart_back_pushed(rows: Tensor, places: Places, group: ops.Group) -> tuple[Tensor, Tensor]:
    """Start `give_back_pushed` -> (the rows, for `arrive_back_pushed`; the rows that return, undefined until then)."""
    assert group is not None
    leaving: Tensor = _Leaving.apply(rows, None, group.group_name)  # type: ignore[no-untyped-call]
    back, num_rows = (places.back_rank, places.back_place), places.rank.shape[0]
    return leaving, start_push(leaving.detach(), *back, num_rows, group.group_name, False)


def arrive_back_pushed(leaving: Tensor, returning: Tensor, places: Places, group: ops.Group) -> Tensor:
    """Await the rows of `depart_back_pushed`."""
    assert group is not None
    to = places.rank, places.place, True, group.group_name
    arrived: Tensor = _Awaited.apply(leaving, returning, *to)  # type: ignore[no-untyped-call]
    return arrived


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


class _Leaving(torch.autograd.Function):
    """Backward awaits the gradients, with 0 where `written` says that no rank writes one."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, written: Tensor | None, group: str) -> Tensor:
        ctx.save_for_backward(written)
        ctx.group = group
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (written,) = ctx.saved_tensors
        return await_push(grad, None, written, ctx.group), None, None


class _Awaited(torch.autograd.Function):
    """The gradient of `leaving` is a ticket; `_Leaving`, which alone reads it, awaits the rows that it stands for."""

    # `rank` and `place` say where the gradients go. With `zeros`, rows that no rank writes are 0; their gradients go
    # nowhere. torch 2.11 compiles no call with the same tensor twice.
    @staticmethod
    def forward(ctx: Any, leaving: Tensor, ticket: Tensor, rank: Tensor, place: Tensor, zeros: bool, group: str):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(rank, place)
        ctx.num_rows, ctx.group = leaving.shape[0], group
        return await_push(ticket, leaving, rank if zeros else None, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rank, place = ctx.saved_tensors
        return start_push(grad, rank, place, ctx.num_rows, ctx.group, True), *[None] * 5


# A compiler may give the memory of an argument to another tensor as soon as an operator has returned. So the rows that
# leave are arguments of `await_push` too, or `start_push` copies them.


@operator("mplug_ep::start_push")
def start_push(rows: Tensor, rank: Tensor, place: Tensor, num_places: int, group: str, copied: bool) -> Tensor:
    """Start `push_rows`, of a copy if `copied` -> a ticket [num_places, D] without content, for `await_push`."""
    rows = rows.clone(memory_format=torch.contiguous_format) if copied else rows.contiguous()
    return MAILBOXES[group].start(rows, rank, place, num_places)


@fake("mplug_ep::start_push")
def _(rows: Tensor, rank: Tensor, place: Tensor, num_places: int, group: str, copied: bool) -> Tensor:
    return rows.new_empty(num_places, rows.shape[1])


@operator("mplug_ep::await_push")
def await_push(ticket: Tensor, leaving: Tensor | None, written: Tensor | None, group: str) -> Tensor:
    """Await the rows [num_places, D] that a ticket of `start_push` stands for; `written` as for `push_rows`.

    `leaving` are the rows that this rank pushes, unless `start_push` has copied them.
    """
    return MAILBOXES[group].wait(ticket, written)


@fake("mplug_ep::await_push")
def _(ticket: Tensor, leaving: Tensor | None, written: Tensor | None, group: str) -> Tensor:
    return torch.empty_like(ticket)


@operator("mplug_ep::push_rows")
def push_rows(rows: Tensor, rank: Tensor, place: Tensor, written: Tensor | None, num_places: int, group: str) -> Tensor:
    """rows [N, D] to place[n] of rank[n] -> the rows [num_places, D] that the ranks have written here.

    `written` [num_places]: not NOWHERE where a rank has written; other rows are 0. None: other rows are arbitrary.
    """
    mailbox = MAILBOXES[group]
    return mailbox.take(mailbox.exchange(rows.contiguous(), rank, place, num_places), written)


@fake("mplug_ep::push_rows")
def _(rows: Tensor, rank: Tensor, place: Tensor, written: Tensor | None, num_places: int, group: str) -> Tensor:
    return rows.new_empty(num_places, rows.shape[1])
