"""Products beside the collectives around them, chunk by chunk (`mplug_nn.ChunkedCollectives`), as operators.

R ranks; B samples; n rows of a rank in a sample, N = R n those of all ranks (N = n if the strategy does not split
rows); P all rows with padding; K contracted. The second operand is a `matrix` [M, K]: rows or columns of a weight.

    gathered_product   y [B, N, M] = gathered(x [B, n, K]) matrixᵀ      the rows of each rank as they arrive
    summed_product     y [B, n, M] = summed(x [P, K] matrixᵀ)           the rows of other ranks first
    gathered_dgrad     `gathered_product`, and what arrived, for the gradient of the weight
    summed_backward    `summed_product`; the gradient of the weight is computed while the last sums travel

A tensor with one scale travels as fp8 numbers, since all ranks have the same scale. If rows or parts of rows have
scales, fp8 numbers travel with their inverses to a product that needs only rows. Columns have other scales. So if
columns are needed too, bf16 travels, and the rows of each chunk are quantised when it has arrived.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.flop_counter import register_flop_formula

from mplug_fp8.emulation import BLOCK, padded
from mplug_fp8.operators import LINES, ROW, TENSOR, add_multiplied, multiply_into, quantised, transposed
from mplug_nn import Produce, Rows, collectives_named, fake, operator


class _Factor(NamedTuple):
    """The second operand of products: numbers [M, K] and inverses, the scalings of both operands, and `fast`."""

    matrix: Tensor
    inverse: Tensor
    scalings: tuple[str, str]
    fast: bool

    def times(self, rows: Tensor, inverse: Tensor, out: Tensor, add: bool) -> None:
        """out [m, M] = rows [m, K] matrixᵀ, or += if `add`: torch has no fp8 product that adds."""
        missing = padded(len(rows), BLOCK) - len(rows) if self.scalings[0] == LINES else 0
        if missing:
            rows = pad(rows.view(torch.uint8), (0, 0, 0, missing)).view(rows.dtype)
            inverse = pad(inverse, (0, missing))
        y = out.new_empty((len(rows), len(self.matrix))) if add or missing else out
        multiply_into(y, rows, self.matrix, inverse, self.inverse, self.scalings, self.fast)
        if add:
            out.add_(y[: len(out)])
        elif missing:
            out.copy_(y[: len(out)])


def _own_inverses(inverse: Tensor, scaling: str, start: int, stop: int) -> Tensor:
    """The inverses of rows start to stop, of [1] (all rows have one), [P] or [K / 128, P]."""
    if scaling == TENSOR:
        return inverse
    return inverse[start:stop] if scaling == ROW else inverse[:, start:stop].contiguous()


def _products(x: Tensor, inverse: Tensor, shape: tuple[int, int], factor: _Factor) -> Produce:
    """The products of rows of x [P, K], which are those of [B, N] and padding."""

    def produce(rows: Rows, out: Tensor, add: bool) -> None:
        for start, stop, target in _stretches(rows, shape, out):
            factor.times(x[start:stop], _own_inverses(inverse, factor.scalings[0], start, stop), target, add)

    return produce


def _stretches(rows: Rows, shape: tuple[int, int], out: Tensor) -> Iterator[tuple[int, int, Tensor]]:
    """Consecutive rows start to stop among all rows [B, N], and their place in out [b, m, M]."""
    samples, positions = range(*rows.samples.indices(shape[0])), range(*rows.positions.indices(shape[1]))
    if len(positions) == shape[1] and out.is_contiguous():
        yield samples.start * shape[1], samples.stop * shape[1], out.view(-1, out.shape[-1])
        return
    for number, sample in enumerate(samples):
        start = sample * shape[1] + positions.start
        yield start, start + len(positions), out[number]


def _matrices(chunk: Tensor, target: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """The samples of a chunk [b, m, K] as matrices, with their places in target [b, m, M]: one if both allow it."""
    if chunk.is_contiguous() and target.is_contiguous():
        yield slice(None), chunk.view(-1, chunk.shape[-1]), target.view(-1, target.shape[-1])
        return
    for number, (own, place) in enumerate(zip(chunk, target, strict=True)):
        yield slice(number, number + 1), own, place


def _numbers(
    own: Tensor, with_it: list[Tensor], inverse: Tensor, factor: _Factor, power_of_two: bool
) -> tuple[Tensor, Tensor]:
    """Rows [m, K] that have arrived in fp8, and their inverses: what came with them [b, m / b, *], or `inverse`."""
    scaling = factor.scalings[0]
    if with_it:
        (found,) = with_it
        return own, found.reshape(-1) if scaling == ROW else found.flatten(0, 1).t().contiguous()
    if scaling == TENSOR:
        return own, inverse
    numbers, found, _, _ = quantised(own, scaling, power_of_two, True, False)
    return numbers[: len(own)], _own_inverses(found, scaling, 0, len(own))


def _gathered(
    part: Tensor, inverse: Tensor, factor: _Factor, power_of_two: bool, chunked: str, keep: bool
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """gathered(part [B, n, K]) matrixᵀ -> bf16 [B, N, M]; and with `keep` what arrived.

    Inverses of three dimensions [B, n, *] travel with the part. A part in bf16 is quantised when it has arrived.
    """
    y = part.new_empty(_gathered_shape(part, len(factor.matrix), chunked), dtype=torch.bfloat16)
    sent = (part, inverse) if inverse.dim() == 3 else (part,)
    with collectives_named(chunked).gathering(*sent, keep=keep) as arrival:
        for rows, (chunk, *with_it) in arrival:
            for number, own, target in _matrices(chunk, rows.of(y)):
                numbers, own_inverse = _numbers(own, [x[number] for x in with_it], inverse, factor, power_of_two)
                factor.times(numbers, own_inverse, target, False)
        return y, arrival.kept() if keep else ()


def _summed(
    x: Tensor, inverse: Tensor, shape: tuple[int, int], factor: _Factor, chunked: str, fill: Any = None
) -> Tensor:
    """summed(x [P, K] matrixᵀ) -> bf16 [B, n, M]; `fill` runs before the own rows are computed."""
    like, partial = x.new_empty(0, dtype=torch.bfloat16), (*shape, len(factor.matrix))
    return collectives_named(chunked).summing(partial, like, _products(x, inverse, shape, factor), fill)


def _gathered_shape(part: Tensor, width: int, chunked: str) -> tuple[int, ...]:
    return part.shape[0], part.shape[1] * collectives_named(chunked).num_parts, width


@operator("mplug_fp8::gathered_product")
def gathered_product(
    part: Tensor,
    inverse: Tensor,
    matrix: Tensor,
    matrix_inverse: Tensor,
    scaling: str,
    other_scaling: str,
    fast: bool,
    chunked: str,
) -> Tensor:
    """fp8 numbers [B, n, K] with inverses, [1] or [B, n, *], and a matrix [M, K] -> bf16 [B, N, M]."""
    factor = _Factor(matrix, matrix_inverse, (scaling, other_scaling), fast)
    return _gathered(part, inverse, factor, False, chunked, keep=False)[0]


@fake("mplug_fp8::gathered_product")
def _(part: Tensor, inverse: Any, matrix: Tensor, matrix_inverse: Any, *more: Any) -> Tensor:
    return part.new_empty(_gathered_shape(part, len(matrix), more[-1]), dtype=torch.bfloat16)


@operator("mplug_fp8::gathered_dgrad")
def gathered_dgrad(
    part: Tensor,
    inverse: Tensor,
    matrix: Tensor,
    matrix_inverse: Tensor,
    scaling: str,
    other_scaling: str,
    power_of_two: bool,
    chunked: str,
) -> tuple[Tensor, Tensor]:
    """A gradient [B, n, K], in fp8 with an inverse [1] or in bf16 -> (bf16 [B, N, M], the gathered gradient)."""
    factor = _Factor(matrix, matrix_inverse, (scaling, other_scaling), False)
    grad_x, (whole,) = _gathered(part, inverse, factor, power_of_two, chunked, keep=True)
    return grad_x, whole


@fake("mplug_fp8::gathered_dgrad")
def _(part: Tensor, inverse: Any, matrix: Tensor, matrix_inverse: Any, *more: Any) -> tuple[Tensor, Tensor]:
    grad_x, whole = (_gathered_shape(part, width, more[-1]) for width in (len(matrix), part.shape[2]))
    return part.new_empty(grad_x, dtype=torch.bfloat16), part.new_empty(whole)


@operator("mplug_fp8::summed_product")
def summed_product(
    x: Tensor,
    inverse: Tensor,
    samples: int,
    length: int,
    matrix: Tensor,
    matrix_inverse: Tensor,
    scaling: str,
    other_scaling: str,
    fast: bool,
    chunked: str,
) -> Tensor:
    """Rows x [P, K] of B samples of N rows, and a matrix [M, K] -> bf16 [B, n, M]."""
    factor = _Factor(matrix, matrix_inverse, (scaling, other_scaling), fast)
    return _summed(x, inverse, (samples, length), factor, chunked)


@fake("mplug_fp8::summed_product")
def _(x: Tensor, inverse: Any, samples: int, length: int, matrix: Tensor, matrix_inverse: Any, *more: Any) -> Tensor:
    shape = samples, length // collectives_named(more[-1]).num_parts, len(matrix)
    return x.new_empty(shape, dtype=torch.bfloat16)


@operator("mplug_fp8::summed_backward", mutates_args=("total", "stale"))
def summed_backward(
    total: Tensor,
    stale: Tensor,
    grad_rows: Tensor,
    row_inverse: Tensor,
    grad_columns: Tensor,
    column_inverse: Tensor,
    x: Tensor,
    x_inverse: Tensor,
    matrix: Tensor,
    matrix_inverse: Tensor,
    scaling: str,
    other_scaling: str,
    power_of_two: bool,
    chunked: str,
) -> Tensor:
    """The gradient of x [B, n, K'], bf16; and total += columns of the gradient of y times those of the gathered x.

    grad_rows [P, K] and grad_columns [K, P] are those of B samples of N rows; matrix [K', K]. x travels in fp8 with an
    inverse [1], or in bf16.
    """
    collectives = collectives_named(chunked)
    factor = _Factor(matrix, matrix_inverse, (scaling, other_scaling), False)
    shape = x.shape[0], x.shape[1] * collectives.num_parts
    with collectives.gathering(x, keep=True) as arrival:

        def add() -> None:
            (whole,) = arrival.whole()
            rows = whole.view(-1, whole.shape[-1])
            if scaling == TENSOR:
                columns, inverse = transposed(rows), x_inverse
            else:
                _, _, columns, inverse = quantised(rows, scaling, power_of_two, False, True)
            add_multiplied(total, stale, grad_columns, columns, column_inverse, inverse, scaling)

        return _summed(grad_rows, row_inverse, shape, factor, chunked, add)


@fake("mplug_fp8::summed_backward")
def _(
    total: Any, stale: Any, rows: Any, row_inverse: Any, columns: Any, column_inverse: Any, x: Tensor, *_: Any
) -> Any:
    return x.new_empty(x.shape, dtype=torch.bfloat16)


def _flops_of(rows: int, matrix: tuple[int, ...]) -> int:
    return 2 * rows * matrix[0] * matrix[1]


@register_flop_formula((torch.ops.mplug_fp8.gathered_product, torch.ops.mplug_fp8.gathered_dgrad))
def _gathered_flops(part: tuple[int, ...], inverse: Any, matrix: tuple[int, ...], *more: Any, **__: Any) -> int:
    return _flops_of(part[0] * part[1] * collectives_named(more[-1]).num_parts, matrix)


@register_flop_formula(torch.ops.mplug_fp8.summed_product)
def _summed_flops(x: Any, inverse: Any, samples: int, length: int, matrix: tuple[int, ...], *_: Any, **__: Any) -> int:
    return _flops_of(samples * length, matrix)


@register_flop_formula(torch.ops.mplug_fp8.summed_backward)
def _backward_flops(total: tuple[int, ...], *given: Any, **__: Any) -> int:
    x, matrix, chunked = given[5], given[7], given[-1]
    rows = x[0] * x[1] * collectives_named(chunked).num_parts
    return _flops_of(rows, matrix) + _flops_of(rows, total)
