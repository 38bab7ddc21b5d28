"""All-to-all of rows in two functions, between which a rank computes something else.

A rank has rows for each rank of the group, ordered by the receiving rank. N rows leave, M rows arrive.

    function      forward                                       backward
    depart        start to send each row                        await the rows' gradients
    arrive        await the rows, and put them into an order    start to return the gradients
    depart_back   start to return each row to its sender        await the rows' gradients, and put them into an order
    arrive_back   await the rows                                start to send the gradients

So in backward, too, what was computed between the two functions of a pair is computed while rows travel. The results
and gradients have the bits of `mplug_ops.rows.send` and `give_back`. Every result of `depart` must be given to `arrive`
once, and nothing else may read it: its rows are undefined until then. The same holds for `depart_back`.

Several exchanges may travel at once. They run in the order in which they start, which must be that of all ranks.
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


def depart_back(
    rows: Tensor, order: Tensor, inverse: Tensor, sizes: Tensor, num_rows: int, group: Group
) -> tuple[Tensor, Tensor]:
    """Start to return rows [M, ...] in the order of `arrive` -> (the rows, for `arrive_back`; the rows that return).

    The latter [num_rows, ...] are undefined until then. `order`, `inverse` and `sizes` are those of `arrive`.
    """
    assert group is not None
    leaving: Tensor = _DepartingBack.apply(rows, order)  # type: ignore[no-untyped-call]
    return leaving, start_return(leaving.detach(), inverse, sizes, num_rows, group.group_name)


def arrive_back(leaving: Tensor, returning: Tensor, sizes: Tensor, group: Group) -> Tensor:
    """Await the rows of `depart_back` -> [num_rows, ...], ordered by the rank that returns them."""
    assert group is not None
    arrived: Tensor = _ArrivingBack.apply(leaving, returning, sizes, group.group_name)  # type: ignore[no-untyped-call]
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


class _DepartingBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor) -> Tensor:
        ctx.save_for_backward(order)
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (order,) = ctx.saved_tensors
        return torch.ops._c10d_functional.wait_tensor(grad).index_select(0, order), None


class _ArrivingBack(torch.autograd.Function):
    """The gradient of `leaving` is undefined until `_DepartingBack`, which alone reads it, has awaited it."""

    @staticmethod
    def forward(ctx: Any, leaving: Tensor, returning: Tensor, sizes: Tensor, group: str) -> Tensor:
        ctx.save_for_backward(sizes)
        ctx.num_rows, ctx.group = leaving.shape[0], group
        arrived: Tensor = torch.ops._c10d_functional.wait_tensor(returning)
        return arrived

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (sizes,) = ctx.saved_tensors
        return start_copy(grad, sizes, ctx.num_rows, ctx.group), None, None, None


# A compiler may give the memory of an argument to another tensor as soon as an operator has returned. So the rows that
# leave are arguments of `await_rows` too, and `start_return` and `start_copy` send a copy. torch keeps it until it is
# awaited.


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


@operator("mplug::start_copy")
def start_copy(rows: Tensor, sizes: Tensor, num_arriving: int, group: str) -> Tensor:
    """Start to send a copy of rows [N, ...]; the result [M, ...] is undefined until it is awaited."""
    sent, received = sizes.tolist()
    arriving = rows.new_empty(num_arriving, *rows.shape[1:])
    _start(arriving, rows[: sum(sent)].clone(memory_format=torch.contiguous_format), received, sent, group)
    return arriving


@fake("mplug::start_copy")
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
