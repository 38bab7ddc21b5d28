"""The suppliers of `Experts.dispatch` and `Experts.combine`: one kernel for each movement of rows, in each direction.

N tokens, k choices of a token, M rows, D width, E experts. The route is that of the defaults, so each of the two
also works with the default of the other. All shapes are known from those of the inputs: the CPU waits for nothing.
"""

import torch
from torch import Tensor

from mplug_nn import fake, operator

Route = tuple[Tensor, ...]


def dispatch(
    x: Tensor,
    chosen: Tensor,
    gates: Tensor,
    num_experts: int,
    num_rows: int | None = None,
) -> tuple[Tensor, Tensor, Route]:
    """x [N, D], chosen [N, k] int64 (`num_experts`: dropped) -> (rows [M, D], counts [E] int64, route).

    Rows of the same expert have the order of the choices. The rows of dropped choices are not written. M is N k, or
    `num_rows`, if the caller knows that no more choices are kept.
    """
    order, back, ends = place_rows(chosen, num_experts)
    counts = ends.diff(prepend=ends.new_zeros(1))[:-1]
    order = order if num_rows is None else order.narrow(0, 0, num_rows)
    route = (order, back.view_as(chosen), ends[-2])
    rows: Tensor = _Dispatch.apply(x, *route[1:], order.shape[0])  # type: ignore[no-untyped-call]
    return rows, counts, route


def combine(rows: Tensor, gates: Tensor, route: Route) -> Tensor:
    """rows [M, D], gates [N, k] (fp32), the route of `dispatch` -> the weighted sums [N, D], added up in fp32."""
    y: Tensor = _Combine.apply(rows, gates, *route[1:])  # type: ignore[no-untyped-call]
    return y


class _Dispatch(torch.autograd.Function):
    """rows[back[n, j]] = x[n]; backward: grad_x[n] = sum_j grad_rows[back[n, j]], without the dropped choices."""

    @staticmethod
    def forward(ctx, x, back, total, num_rows):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(back, total)
        return spread_rows(x, back, total, num_rows)

    @staticmethod
    def backward(ctx, grad_rows):  # type: ignore[no-untyped-def]
        return gather_rows(grad_rows, *ctx.saved_tensors, None), None, None, None


class _Combine(torch.autograd.Function):
    """y[n] = sum_j gates[n, j] rows[back[n, j]]; backward passes once over the rows and the tokens' gradients.

    grad_rows[back[n, j]] = gates[n, j] grad_y[n], grad_gates[n, j] = rows[back[n, j]] . grad_y[n].
    """

    @staticmethod
    def forward(ctx, rows, gates, back, total):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(rows, gates, back, total)
        return gather_rows(rows, back, total, gates)

    @staticmethod
    def backward(ctx, grad_y):  # type: ignore[no-untyped-def]
        rows, gates, back, total = ctx.saved_tensors
        return *combine_gradient(grad_y, rows, gates, back, total), None, None


# Operators that a compiler does not look into. Triton is imported when they run, not when they are declared.


@operator("mplug_triton::place_rows")
def place_rows(chosen: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """chosen [N, k] -> (order [M]: the choice of each row; back [M]: the row of each choice; ends [E + 1]), int64."""
    from mplug_triton.rows_launch import place

    order, back, ends = place(chosen, num_experts)
    return order, back, ends.contiguous()


@fake("mplug_triton::place_rows")
def _(chosen: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    return chosen.new_empty(chosen.numel()), chosen.new_empty(chosen.numel()), chosen.new_empty(num_experts + 1)


@operator("mplug_triton::spread_rows")
def spread_rows(x: Tensor, back: Tensor, total: Tensor, num_rows: int) -> Tensor:
    """x [N, D], back [N, k], total [] -> rows [num_rows, D]: each token's row at all of its places below total."""
    from mplug_triton.rows_launch import spread

    rows = x.new_empty(num_rows, x.shape[-1])
    spread(x.contiguous(), back, total, rows, None, None, None)
    return rows


@fake("mplug_triton::spread_rows")
def _(x: Tensor, back: Tensor, total: Tensor, num_rows: int) -> Tensor:
    return x.new_empty(num_rows, x.shape[-1])


@operator("mplug_triton::gather_rows")
def gather_rows(rows: Tensor, back: Tensor, total: Tensor, gates: Tensor | None) -> Tensor:
    """rows [M, D], back [N, k], total [], gates [N, k] or None (all 1) -> the tokens' sums [N, D]."""
    from mplug_triton.rows_launch import gather

    y = rows.new_empty(back.shape[0], rows.shape[-1])
    gather(rows.contiguous(), back, total, y, None if gates is None else gates.contiguous())
    return y


@fake("mplug_triton::gather_rows")
def _(rows: Tensor, back: Tensor, total: Tensor, gates: Tensor | None) -> Tensor:
    return rows.new_empty(back.shape[0], rows.shape[-1])


@operator("mplug_triton::combine_gradient")
def combine_gradient(grad_y: Tensor, rows: Tensor, gates: Tensor, back: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
    """grad_y [N, D], rows [M, D], gates and back [N, k], total [] -> the gradients of rows and of gates."""
    from mplug_triton.rows_launch import spread

    grad_rows, grad_gates = torch.empty_like(rows), torch.empty_like(gates, memory_format=torch.contiguous_format)
    spread(grad_y.contiguous(), back, total, grad_rows, gates.contiguous(), rows.contiguous(), grad_gates)
    return grad_rows, grad_gates


@fake("mplug_triton::combine_gradient")
def _(grad_y: Tensor, rows: Tensor, gates: Tensor, back: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(rows), torch.empty_like(gates, memory_format=torch.contiguous_format)
