"""All-to-all of rows in two functions, between which a rank computes something else.

A rank has rows for each rank of the group, ordered by the receiving rank. N rows leave, M rows arrive.

    function   forward                                       backward
    depart     start to send each row                        await the rows' gradients
    arrive     await the rows, and put them into an order    start to return the gradients

So in backward, too, what was computed between the two functions is computed while rows travel. The results and
gradients have the bits of `mplug_ops.rows.send`. Every result of `depart` must be given to `arrive` once, and nothing
else may read it: its rows are undefined until then.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mplug.tensors.operator import fake, operator
from mplug_ops.collectives import Group
from mplug_ops.operators import _group


def depart(rows: Tensor, sizes: Tensor, num_arriving: int, group: Group) -> tuple[Tensor, Tensor]:
    """Start to send rows [N, ...] -> (the rows, for `arrive`; the rows [M, ...] that arrive, undefined until then).

    `sizes` [2, R], on the CPU: number of rows sent to and received from each rank. `num_arriving` is M.
    """
    assert group is not None
    leaving: Tensor = _Departing.apply(rows)  # type: ignore[no-untyped-call]
    return leaving, start_rows(leaving.detach(), sizes, num_arriving, group.group_name)


def arrive(leaving: Tensor, arriving: Tensor, order: Tensor, inverse: Tensor, sizes: Tensor, group: Group) -> Tensor:
    """Await the rows of `depart` -> [M, ...]: row i is the arriving row `order[i]`; `inverse` is its inverse."""
    assert group is not None
    args = leaving, arriving, order, inverse, sizes, group.group_name
    arrived: Tensor = _Arriving.apply(*args)  # type: ignore[no-untyped-call]
    return arrived


class _Departing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:  # noqa: ARG004
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # noqa: ARG004
        awaited: Tensor = torch.ops._c10d_functional.wait_tensor(grad)
        return awaited


class _Arriving(torch.autograd.Function):
    """The gradient of `leaving` is undefined until `_Departing`, which alone reads it, has awaited it."""

    @staticmethod
    def forward(
        ctx: Any, leaving: Tensor, arriving: Tensor, order: Tensor, inverse: Tensor, sizes: Tensor, group: str
    ) -> Tensor:
        ctx.save_for_backward(inverse, sizes)
        ctx.num_rows, ctx.group = leaving.shape[0], group
        return await_rows(arriving, leaving, order)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        inverse, sizes = ctx.saved_tensors
        return start_return(grad, inverse, sizes, ctx.num_rows, ctx.group), *[None] * 5


# A compiler may give the memory of an argument to another tensor as soon as an operator has returned. So the rows that
# leave are arguments of `await_rows` too, and `start_return` sends a copy, which torch keeps until it is awaited.


@operator("mplug::start_rows")
def start_rows(rows: Tensor, sizes: Tensor, num_arriving: int, group: str) -> Tensor:
    """Start to send rows [N, ...]; the result [M, ...] is undefined until `await_rows`."""
    sent, received = sizes.tolist()
    arriving = rows.new_empty(num_arriving, *rows.shape[1:])
    _start(arriving, rows[: sum(sent)].contiguous(), received, sent, group)
    return arriving


@fake("mplug::start_rows")
def _(rows: Tensor, sizes: Tensor, num_arriving: int, group: str) -> Tensor:
    return rows.new_empty(num_arriving, *rows.shape[1:])


@operator("mplug::await_rows")
def await_rows(arriving: Tensor, leaving: Tensor, order: Tensor) -> Tensor:
    """The rows that arrive, in another order: arriving[order]. `leaving` are the rows that `start_rows` sends."""
    return torch.ops._c10d_functional.wait_tensor(arriving).index_select(0, order)  # type: ignore[no-any-return]


@fake("mplug::await_rows")
def _(arriving: Tensor, leaving: Tensor, order: Tensor) -> Tensor:
    return arriving.new_empty(order.shape[0], *arriving.shape[1:])


@operator("mplug::start_return")
def start_return(rows: Tensor, inverse: Tensor, sizes: Tensor, num_rows: int, group: str) -> Tensor:
    """Start to return rows [M, ...] to their senders; the result [N, ...] is undefined until it is awaited.

    Rows of the result that were not sent stay undefined.
    """
    sent, received = sizes.tolist()
    own = rows.new_empty(num_rows, *rows.shape[1:])
    _start(own, rows.index_select(0, inverse), sent, received, group)
    return own


@fake("mplug::start_return")
def _(rows: Tensor, inverse: Tensor, sizes: Tensor, num_rows: int, group: str) -> Tensor:
    return rows.new_empty(num_rows, *rows.shape[1:])


def _start(into: Tensor, rows: Tensor, into_sizes: list[int], sizes: list[int], group: str) -> None:
    """Start an exchange into the first rows of a tensor, which torch's `wait_tensor` awaits."""
    first = into[: sum(into_sizes)]
    work = dist.all_to_all_single(first, rows, into_sizes, sizes, group=_group(group), async_op=True)
    torch._C._distributed_c10d._register_work(into, work)
