"""A linear's product whose collectives overlap with its matrix products, as torch operators.

R ranks; n rows of a rank, N = R n those of all (N = n without sequence parallelism); I inputs, O outputs, of which a
rank has I/R or O/R. Forward:

    column-parallel    y [..., N, O/R] = gathered(x [..., n, I]) Wᵀ           the rows of each rank as they arrive
    row-parallel       y [..., n, O] = summed(x [..., N, I/R] Wᵀ)             the rows of other ranks first

Backward. Both save x as it is:

    column-parallel    grad_x [..., n, I] = summed(grad_y [..., N, O/R] W);   grad_W = grad_yᵀ gathered(x)
    row-parallel       grad_x [..., N, I/R] = gathered(grad_y [..., n, O]) W; grad_W = gathered(grad_y)ᵀ x

A column-parallel product computes both in one operator: x is gathered again beside the grad_x of other ranks' rows, and
grad_W is computed while these travel. A row-parallel product has two, because the compiler computes x again after
grad_x, if x is the output of an activation.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from mplug_nn import Narrow, Operand, Product, Rows, Sink, add_product, collectives_named, fake, operator
from mplug_nn.gemm import PLAIN
from mplug_nn.product import COMPOSED


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def multiply(a: Tensor, matrix: Tensor, out: Tensor, add: bool) -> None:
    """out [b, m, X] = a [b, m, I] matrix [I, X], or += if `add` is true; a and out may be rows of larger tensors."""
    if len(a) == 1 or (a.is_contiguous() and out.is_contiguous()):
        a, out = (x[0] if len(x) == 1 else x.view(-1, x.shape[-1]) for x in (a, out))
        out.addmm_(a, matrix) if add else torch.mm(a, matrix, out=out)
        return
    repeated = matrix.expand(len(a), -1, -1)  # one product of batches: without copies of a or of the matrix
    out.baddbmm_(a, repeated) if add else torch.bmm(a, repeated, out=out)


def _products(x: Tensor, matrix: Tensor) -> Callable[[Rows, Tensor, bool], None]:
    """The rows of x [..., N, I] times matrix [I, X]."""

    def produce(rows: Rows, out: Tensor, add: bool) -> None:
        multiply(rows.of(x), matrix, out, add)

    return produce


def _gathered(x: Tensor, matrix: Tensor, chunked: str, keep: bool) -> tuple[Tensor, tuple[Tensor, ...]]:
    """gathered(x [..., n, I]) matrix [I, X] -> [..., N, X]; and with `keep` the gathered x."""
    y = x.new_empty(_gathered_shape(x, matrix.shape[1], chunked))
    with collectives_named(chunked).gathering(x, keep=keep) as arrival:
        for rows, (chunk,) in arrival:
            multiply(chunk, matrix, rows.of(y), False)
        return y, arrival.kept() if keep else ()


def _summed(x: Tensor, matrix: Tensor, chunked: str, fill: Callable[[], None] | None = None) -> Tensor:
    """summed(x [..., N, I] matrix [I, X]) -> [..., n, X]; `fill` runs before the own rows are computed."""
    shape = (*x.shape[:-1], matrix.shape[1])
    return collectives_named(chunked).summing(shape, x, _products(x.contiguous(), matrix), fill)


def _gathered_shape(x: Tensor, width: int, chunked: str) -> tuple[int, ...]:
    return (*x.shape[:-2], x.shape[-2] * collectives_named(chunked).num_parts, width)


def _summed_shape(x: Tensor, width: int, chunked: str) -> tuple[int, ...]:
    return (*x.shape[:-2], x.shape[-2] // collectives_named(chunked).num_parts, width)


@operator("mplug_tp::gathered_product")
def gathered_product(x: Tensor, weight: Tensor, chunked: str) -> Tensor:
    """Column-parallel: x [..., n, I] and weight [O/R, I] -> [..., N, O/R]."""
    return _gathered(x, weight.t(), chunked, keep=False)[0]


@fake("mplug_tp::gathered_product")
def _(x: Tensor, weight: Tensor, chunked: str) -> Tensor:
    return x.new_empty(_gathered_shape(x, weight.shape[0], chunked))


@operator("mplug_tp::summed_product")
def summed_product(x: Tensor, weight: Tensor, chunked: str) -> Tensor:
    """Row-parallel: x [..., N, I/R] and weight [O, I/R] -> [..., n, O]."""
    return _summed(x, weight.t(), chunked)


@fake("mplug_tp::summed_product")
def _(x: Tensor, weight: Tensor, chunked: str) -> Tensor:
    return x.new_empty(_summed_shape(x, weight.shape[0], chunked))


@operator("mplug_tp::summed_dgrad")
def summed_dgrad(grad_y: Tensor, weight: Tensor, chunked: str) -> Tensor:
    """Column-parallel: grad_y [..., N, O/R] and weight [O/R, I] -> grad_x [..., n, I]."""
    return _summed(grad_y, weight, chunked)


@fake("mplug_tp::summed_dgrad")
def _(grad_y: Tensor, weight: Tensor, chunked: str) -> Tensor:
    return grad_y.new_empty(_summed_shape(grad_y, weight.shape[1], chunked))


@operator("mplug_tp::summed_backward", mutates_args=("total", "stale"))
def summed_backward(total: Tensor, stale: Tensor, grad_y: Tensor, x: Tensor, weight: Tensor, chunked: str) -> Tensor:
    """Column-parallel: `summed_dgrad`, and total [O/R, I] += grad_yᵀ gathered(x [..., n, I])."""
    with collectives_named(chunked).gathering(x, keep=True) as arrival:

        def add() -> None:
            (whole,) = arrival.whole()
            add_product(total, stale, _rows(grad_y).t(), _rows(whole))

        return _summed(grad_y, weight, chunked, add)


@fake("mplug_tp::summed_backward")
def _(total: Tensor, stale: Tensor, grad_y: Tensor, x: Tensor, weight: Tensor, chunked: str) -> Tensor:
    return x.new_empty(x.shape)


@operator("mplug_tp::gathered_dgrad")
def gathered_dgrad(grad_y: Tensor, weight: Tensor, chunked: str) -> tuple[Tensor, Tensor]:
    """Row-parallel: grad_y [..., n, O] and weight [O, I/R] -> (grad_x [..., N, I/R], gathered grad_y [..., N, O])."""
    grad_x, (whole,) = _gathered(grad_y, weight, chunked, keep=True)
    return grad_x, whole


@fake("mplug_tp::gathered_dgrad")
def _(grad_y: Tensor, weight: Tensor, chunked: str) -> tuple[Tensor, Tensor]:
    widths = weight.shape[1], weight.shape[0]
    grad_x, whole = (grad_y.new_empty(_gathered_shape(grad_y, width, chunked)) for width in widths)
    return grad_x, whole


class Overlapped(Product):
    """The supplier of `Linear.product` at the linears whose weight is split. It keeps x as it comes.

    If `Linear.gemm` has a supplier, its products are computed whole, and the collectives wait.
    """

    calls = ("Linear.gemm",)

    def forward(
        self, x: Tensor, weight: Operand, narrow: Narrow, buffers: Mapping[str, Tensor]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Gather and multiply, or multiply and sum."""
        column, chunked, gathers = _kind(narrow)
        if narrow.gemm is not PLAIN or (column and not gathers):
            return COMPOSED.forward(x, weight, narrow, buffers)
        return (gathered_product if column else summed_product)(x, weight.values, chunked), (x,)

    def dgrad(
        self,
        grad_y: Tensor,
        weight: Operand,
        saved: tuple[Tensor, ...],
        narrow: Narrow,
        buffers: Mapping[str, Tensor],
        needs_x: bool,
    ) -> tuple[Tensor | None, tuple[Tensor, ...]]:
        """The operands of `wgrad` are those of the default: the gradient of the whole output, and x as it came."""
        column, chunked, gathers = _kind(narrow)
        if narrow.gemm is not PLAIN or not needs_x or not (column or gathers):
            return COMPOSED.dgrad(grad_y, weight, saved, narrow, buffers, needs_x)
        if column:
            return summed_dgrad(grad_y, weight.values, chunked), (grad_y, *saved)
        grad_x, whole = gathered_dgrad(grad_y, weight.values, chunked)
        return grad_x, (whole, *saved)

    def wgrad(
        self, operands: tuple[Tensor, ...], sink: Sink | None, narrow: Narrow, buffers: Mapping[str, Tensor]
    ) -> Tensor | None:
        """That of the default: alone, it has nothing to overlap with."""
        return COMPOSED.wgrad(operands, sink, narrow, buffers)

    def backward(
        self,
        grad_y: Tensor,
        weight: Operand,
        saved: tuple[Tensor, ...],
        sink: Sink | None,
        narrow: Narrow,
        buffers: Mapping[str, Tensor],
        needs_x: bool,
    ) -> tuple[Tensor | None, Tensor | None]:
        """One operator for both gradients of a column-parallel product, one for each of a row-parallel product."""
        column, chunked, _ = _kind(narrow)
        if narrow.gemm is not PLAIN or not column or not needs_x:
            return super().backward(grad_y, weight, saved, sink, narrow, buffers, needs_x)
        (x,), own = saved, sink or _own_sink(grad_y, *saved)
        return summed_backward(*own, grad_y, x, weight.values, chunked), None if sink else own.total


OVERLAPPED = Overlapped()


def _own_sink(grad_y: Tensor, x: Tensor) -> Sink:
    """A sink for a gradient that is returned: its memory has no values yet."""
    stale = torch.ones((), dtype=torch.bool, device="cpu")
    return Sink(x.new_empty(grad_y.shape[-1], x.shape[-1]), stale)


def _kind(narrow: Narrow) -> tuple[bool, str, bool]:
    """(whether the product is column-parallel, the name of its chunked collectives, whether they gather at all)."""
    boundary = narrow.before or narrow.after
    assert boundary is not None
    return narrow.before is not None, boundary.chunked, collectives_named(boundary.chunked).num_parts > 1
