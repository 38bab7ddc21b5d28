"""All-to-all of rows by kernels that write each row directly into the memory of the GPU that needs it.

N rows of a rank, M places for the rows that it receives, D width (`mplug_ep.places`).

    function          forward                                              backward
    send_pushed       each row to its place on the rank that owns its bin  the rows' gradients, to their senders
    give_back_pushed  each row to its sender                               gradients, sent like the rows

Without lost rows, results and gradients have the bits of `mplug.ops.send` and `give_back`, with other padding. No shape
depends on the data, so the CPU waits for nothing. The GPUs of a group wait for each other once in an exchange.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mplug import Run, UsageError, ops, triton_builds
from mplug_ep.places import NOWHERE, Places
from mplug_nn import fake, operator

SETTING, REMEDY = "parallel.ep.dispatch=symmetric", "use parallel.ep.dispatch=bounded or all_to_all"
BYTES_OF_WARP = 32 * 16
"""Bytes that the threads of a warp move at once."""


class Mailbox:
    """Memory of the ranks of a group into which all of them write rows: two in turn.

    A rank writes into one of the two after a barrier that the others reach only when they have read what it had before.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._memories = (ops.PeerMemory(group), ops.PeerMemory(group))
        self._group, self._next = group, 0

    def exchange(self, rows: Tensor, rank: Tensor, place: Tensor, num_places: int) -> Tensor:
        """Write rows [N, D] to their places on their ranks -> what this rank has got [num_places, D].

        Places that no rank writes have what they had. The result is valid until the next exchange but one.
        """
        memory, self._next = self._memories[self._next], 1 - self._next
        shape = (num_places, rows.shape[1])
        memory.reserve(ops.size_of((max(num_places, len(rows)), rows.shape[1]), rows.dtype))
        _push(rows, rank, place, memory.addresses())
        memory.barrier()
        return memory.tensor(self._group.rank(), shape, rows.dtype, 0)


def _push(rows: Tensor, rank: Tensor, place: Tensor, addresses: Tensor) -> None:
    """Launch the kernel."""
    from mplug_ep.pushed_kernel import triton_push_rows

    if len(rows):
        width = rows.shape[1]
        padded = 1 << (width - 1).bit_length()
        num_warps = max(1, min(16, padded * rows.element_size() // BYTES_OF_WARP))
        with torch.cuda.device_of(rows):
            triton_push_rows[(len(rows),)](rows, rank, place, addresses, D=width, WIDTH=padded, num_warps=num_warps)


MAILBOXES: dict[str, Mailbox] = {}
"""Names of groups -> the memory of the group."""


def open_mailbox(run: Run, group: ops.Group) -> None:
    """Make a mailbox for the ranks of a group, or raise UsageError if the GPUs cannot access each other's memory.

    Collective. It reserves no memory.
    """
    if not run.device.startswith("cuda"):
        raise UsageError(f"{SETTING} writes rows into the memory of other GPUs, and this run is on the CPU; {REMEDY}")
    if not triton_builds():
        raise UsageError(f"{SETTING} needs Triton and a C compiler on this machine; install them, or {REMEDY}")
    if group is None:
        return
    if not ops.reachable(group):
        ranks = ", ".join(map(str, dist.get_process_group_ranks(group)))
        raise UsageError(
            f"{SETTING} needs GPUs of one machine that may access each other's memory, and those of the ranks {ranks}, "
            f"which share experts, may not; {REMEDY}"
        )
    MAILBOXES[group.group_name] = Mailbox(group)


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
    arrived = MAILBOXES[group].exchange(rows.contiguous(), rank, place, num_places)
    return arrived.clone() if written is None else torch.where((written != NOWHERE)[:, None], arrived, 0)


@fake("mplug_ep::push_rows")
def _(rows: Tensor, rank: Tensor, place: Tensor, written: Tensor | None, num_places: int, group: str) -> Tensor:
    return rows.new_empty(num_places, rows.shape[1])
