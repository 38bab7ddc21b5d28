"""A linear's product whose collectives overlap with its matrix products, as torch operators.

R ranks; n rows of a rank, N = R n those of all (N = n without sequence parallelism); I inputs, O outputs, of which a
rank has I/R or O/R. Forward:

    column-parallel    y [..., N, O/R] = gathered(x [..., n, I]) Wᵀ           the rows of each rank as they arrive
    row-parallel       y [..., n, O] = summed(x [..., N, I/R] Wᵀ)             the rows of other ranks first

Backward. Both save x as it is; a column-parallel product gathers it again, beside the products of grad_x:

    column-parallel    grad_x [..., n, I] = summed(grad_y [..., N, O/R] W);   grad_W = grad_yᵀ gathered(x)
    row-parallel       grad_x [..., N, I/R] = gathered(grad_y [..., n, O]) W; grad_W = gathered(grad_y)ᵀ x

The weight's gradient of a column-parallel product is computed between the grad_x of other ranks' rows and of own rows.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from mplug.nn import Narrow, Operand, Product, Rows, Sink, add_product, fake, operator, pipeline_named


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


def _gathered(x: Tensor, matrix: Tensor, pipeline: str, then: Callable[[Tensor], None] | None = None) -> Tensor:
    """gathered(x [..., n, I]) matrix [I, X] -> [..., N, X]; `then` receives the gathered x."""
    y = x.new_empty((*x.shape[:-2], x.shape[-2] * pipeline_named(pipeline).num_parts, matrix.shape[1]))
    with pipeline_named(pipeline).gathering(x, keep=then is not None) as arrival:
        for rows, (chunk,) in arrival:
            multiply(chunk, matrix, rows.of(y), False)
        if then is not None:
            then(*arrival.whole())
    return y


def _summed(x: Tensor, matrix: Tensor, pipeline: str, fill: Callable[[], None] | None = None) -> Tensor:
    """summed(x [..., N, I] matrix [I, X]) -> [..., n, X]; `fill` runs before the own rows are computed."""
    shape = (*x.shape[:-1], matrix.shape[1])
    return pipeline_named(pipeline).summing(shape, x, _products(x.contiguous(), matrix), fill)


def _adding(total: Tensor, stale: Tensor, grad_y: Tensor, x: Tensor) -> None:
    add_product(total, stale, _rows(grad_y).t(), _rows(x))


# Forward.


@operator("mplug_tp::gathered_product")
def gathered_product(x: Tensor, weight: Tensor, pipeline: str) -> Tensor:
    """Column-parallel: x [..., n, I] and weight [O/R, I] -> [..., N, O/R]."""
    return _gathered(x, weight.t(), pipeline)


@fake("mplug_tp::gathered_product")
def _(x: Tensor, weight: Tensor, pipeline: str) -> Tensor:
    return x.new_empty(*x.shape[:-2], x.shape[-2] * pipeline_named(pipeline).num_parts, weight.shape[0])


@operator("mplug_tp::summed_product")
def summed_product(x: Tensor, weight: Tensor, pipeline: str) -> Tensor:
    """Row-parallel: x [..., N, I/R] and weight [O, I/R] -> [..., n, O]."""
    return _summed(x, weight.t(), pipeline)


@fake("mplug_tp::summed_product")
def _(x: Tensor, weight: Tensor, pipeline: str) -> Tensor:
    return x.new_empty(*x.shape[:-2], x.shape[-2] // pipeline_named(pipeline).num_parts, weight.shape[0])


# The gradient of x alone.


@operator("mplug_tp::summed_dgrad")
def summed_dgrad(grad_y: Tensor, weight: Tensor, pipeline: str) -> Tensor:
    """Column-parallel: grad_y [..., N, O/R] and weight [O/R, I] -> [..., n, I]."""
    return _summed(grad_y, weight, pipeline)


@fake("mplug_tp::summed_dgrad")
def _(grad_y: Tensor, weight: Tensor, pipeline: str) -> Tensor:
    return grad_y.new_empty(*grad_y.shape[:-2], grad_y.shape[-2] // pipeline_named(pipeline).num_parts, weight.shape[1])


@operator("mplug_tp::gathered_dgrad")
def gathered_dgrad(grad_y: Tensor, weight: Tensor, pipeline: str) -> Tensor:
    """Row-parallel: grad_y [..., n, O] and weight [O, I/R] -> [..., N, I/R]."""
    return _gathered(grad_y, weight, pipeline)


@fake("mplug_tp::gathered_dgrad")
def _(grad_y: Tensor, weight: Tensor, pipeline: str) -> Tensor:
    return grad_y.new_empty(*grad_y.shape[:-2], grad_y.shape[-2] * pipeline_named(pipeline).num_parts, weight.shape[1])


# The weight's gradient alone: one of its operands is gathered.


@operator("mplug_tp::add_gathered_wgrad", mutates_args=("total", "stale"))
def add_gathered_wgrad(total: Tensor, stale: Tensor, grad_y: Tensor, x: Tensor, of_x: bool, pipeline: str) -> None:
    """total += grad_yᵀ x, of which x (if `of_x`) or grad_y has only this rank's rows."""
    with pipeline_named(pipeline).gathering(x if of_x else grad_y, keep=True) as arrival:
        (whole,) = arrival.whole()
        _adding(total, stale, *((grad_y, whole) if of_x else (whole, x)))


# Both gradients.


@operator("mplug_tp::summed_backward", mutates_args=("total", "stale"))
def summed_backward(total: Tensor, stale: Tensor, grad_y: Tensor, x: Tensor, weight: Tensor, pipeline: str) -> Tensor:
    """Column-parallel: `summed_dgrad` and `add_gathered_wgrad`; the second hides the transfers of the first."""
    with pipeline_named(pipeline).gathering(x, keep=True) as arrival:
        return _summed(grad_y, weight, pipeline, lambda: _adding(total, stale, grad_y, *arrival.whole()))


@fake("mplug_tp::summed_backward")
def _(total: Tensor, stale: Tensor, grad_y: Tensor, x: Tensor, weight: Tensor, pipeline: str) -> Tensor:
    return x.new_empty(x.shape)


@operator("mplug_tp::gathered_backward", mutates_args=("total", "stale"))
def gathered_backward(total: Tensor, stale: Tensor, grad_y: Tensor, x: Tensor, weight: Tensor, pipeline: str) -> Tensor:
    """Row-parallel: `gathered_dgrad` and `add_gathered_wgrad`, with one gathering for both."""
    return _gathered(grad_y, weight, pipeline, lambda whole: _adding(total, stale, whole, x))


@fake("mplug_tp::gathered_backward")
def _(total: Tensor, stale: Tensor, grad_y: Tensor, x: Tensor, weight: Tensor, pipeline: str) -> Tensor:
    return x.new_empty(x.shape)


class Overlapped(Product):
    """The supplier of `Linear.product` at the linears whose weight is split. It keeps x as it comes."""

    def forward(
        self, x: Tensor, weight: Operand, narrow: Narrow, buffers: Mapping[str, Tensor]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Gather and multiply, or multiply and sum."""
        column, pipeline = _kind(narrow)
        return (gathered_product if column else summed_product)(x, weight.values, pipeline), (x,)

    def dgrad(
        self,
        grad_y: Tensor,
        weight: Operand,
        saved: tuple[Tensor, ...],
        narrow: Narrow,
        buffers: Mapping[str, Tensor],
        needs_x: bool,
    ) -> tuple[Tensor | None, tuple[Tensor, ...]]:
        """The operands of `wgrad` are the gradient and the input, both as they come."""
        column, pipeline = _kind(narrow)
        product = summed_dgrad if column else gathered_dgrad
        return product(grad_y, weight.values, pipeline) if needs_x else None, (grad_y, *saved)

    def wgrad(
        self, operands: tuple[Tensor, ...], sink: Sink | None, narrow: Narrow, buffers: Mapping[str, Tensor]
    ) -> Tensor | None:
        """Gathers the operand that is not whole."""
        grad_y, x = operands
        own = sink or _own_sink(grad_y, x)
        add_gathered_wgrad(*own, grad_y, x, *_kind(narrow))
        return None if sink else own.total

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
        """Both gradients in one operator."""
        if not needs_x:
            return None, self.wgrad((grad_y, *saved), sink, narrow, buffers)
        (x,), (column, pipeline), own = saved, _kind(narrow), sink or _own_sink(grad_y, *saved)
        grad_x = (summed_backward if column else gathered_backward)(*own, grad_y, x, weight.values, pipeline)
        return grad_x, None if sink else own.total


OVERLAPPED = Overlapped()


def _own_sink(grad_y: Tensor, x: Tensor) -> Sink:
    """A sink for a gradient that is returned: its memory has no values yet."""
    stale = torch.ones((), dtype=torch.bool, device="cpu")
    return Sink(x.new_empty(grad_y.shape[-1], x.shape[-1]), stale)


def _kind(narrow: Narrow) -> tuple[bool, str]:
    """(whether the product is column-parallel, the name of its pipeline)."""
    boundary = narrow.before or narrow.after
    assert boundary is not None
    return narrow.before is not None, boundary.pipeline
