"""The products of linear layers in each recipe: the content of the slot `Linear.product`.

N rows of all ranks, n of this rank, I inputs, O outputs, P padded rows. `rows` and `columns` are fp8 numbers and their
transpose (see `emulation`). The three products read operands whose contracted dimension is contiguous:

    forward   y [N, O]       = rows of x [N, I] times rows of the weight [O, I]
    dgrad     grad_x [N, I]  = rows of grad_y [N, O] times columns of the weight [I, O]
    wgrad     grad_w [O, I]  = columns of grad_y [O, P] times columns of x [I, P]

So forward saves the columns of x, which have half the bytes of x in bf16.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from mplug.nn import Boundary, Narrow, Operand, Product, Sink
from mplug_fp8.delayed import GRADIENT, INPUT, scale_name
from mplug_fp8.operators import (
    BLOCKS,
    LINES,
    ROW,
    TENSOR,
    add_multiplied,
    cast,
    cast_blocks,
    cast_lines,
    cast_rowwise,
    cast_scaled,
    largest,
    multiply,
    rows_of,
    transposed,
)
from mplug_fp8.recipes import E5M2, Options

Buffers = Mapping[str, Tensor]
Quantised = tuple[Tensor, Tensor, Tensor, Tensor]
"""rows, their inverses, columns, their inverses."""


@dataclass(frozen=True)
class Products(Product):
    """The three products, from operands that a recipe quantises."""

    options: Options
    line, block = TENSOR, TENSOR
    """The scalings of activations and gradients, and of weights."""
    fast = True
    """Whether forward sums in the tensor cores' narrower format, which is faster. Gradients never do."""

    def quantised(
        self, x: Tensor, operand: str, boundary: Boundary | None, buffers: Buffers
    ) -> tuple[tuple[int, ...], Quantised]:
        """This rank's part of an operand [..., n, X] -> the shape of the whole, and the whole [N, X] in fp8."""
        raise NotImplementedError

    def copies(self, weight: Operand) -> Quantised:
        """Rows and columns of the weight, from the results of `cast`."""
        rows, row_inverses, columns, column_inverses = weight.casts
        return rows, row_inverses, columns, column_inverses

    def forward(
        self, x: Tensor, weight: Operand, narrow: Narrow, buffers: Buffers
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """x [..., n, I] -> (this rank's part of x Wᵀ, the columns of x and their inverses)."""
        shape, (rows, inverse, *columns) = self.quantised(x, INPUT, narrow.before, buffers)
        weight_rows, weight_inverse, _, _ = self.copies(weight)
        y = multiply(rows, weight_rows, inverse, weight_inverse, self.line, self.block, self.fast)
        return narrow.scattered(_like(y, shape)), tuple(columns)

    def dgrad(
        self,
        grad_y: Tensor,
        weight: Operand,
        saved: tuple[Tensor, ...],
        narrow: Narrow,
        buffers: Buffers,
        needs_x: bool,
    ) -> tuple[Tensor | None, tuple[Tensor, ...]]:
        """grad_y -> (the gradient of x, the columns of grad_y and of x with their inverses)."""
        shape, (rows, inverse, *columns) = self.quantised(grad_y, GRADIENT, narrow.after, buffers)
        operands = (*columns, *saved)
        if not needs_x:
            return None, operands
        _, _, weight_columns, weight_inverse = self.copies(weight)
        grad_x = multiply(rows, weight_columns, inverse, weight_inverse, self.line, self.block, False)
        return narrow.scattered_gradient(_like(grad_x, shape)), operands

    def wgrad(
        self,
        operands: tuple[Tensor, ...],
        sink: Sink | None,
        narrow: Narrow,
        buffers: Buffers,
    ) -> Tensor | None:
        """Add the weight's gradient [O, I] to the sink, or return it in bf16."""
        columns, inverse, x_columns, x_inverse = operands
        if sink is None:
            return multiply(columns, x_columns, inverse, x_inverse, self.line, self.line, False)
        add_multiplied(*sink, columns, x_columns, inverse, x_inverse, self.line)
        return None


def _like(y: Tensor, shape: tuple[int, ...]) -> Tensor:
    """y [P, O] without padding, in the leading dimensions of an operand."""
    num_rows = 1
    for size in shape[:-1]:
        num_rows *= size
    return y[:num_rows].view(*shape[:-1], y.shape[1])


class Tensorwise(Products):
    """One scale for a tensor, from its own largest absolute value.

    Under sequence parallelism the ranks agree on the largest value, quantise their parts, and gather fp8 numbers, which
    are half the bytes of bf16.
    """

    def cast(self, weight: Tensor, buffers: Buffers) -> tuple[Tensor, ...]:
        """Rows [O, I] and columns [I, O] of the weight, with one inverse."""
        rows, columns, inverse = cast(weight, largest(weight), False, self.options.power_of_two, True, True)
        return rows, inverse, columns

    def copies(self, weight: Operand) -> Quantised:
        """Rows and columns, which have the same inverse."""
        rows, inverse, columns = weight.casts
        return rows, inverse, columns, inverse

    def quantised(
        self, x: Tensor, operand: str, boundary: Boundary | None, buffers: Buffers
    ) -> tuple[tuple[int, ...], Quantised]:
        """Rows and columns in one pass; under a boundary, columns of the gathered rows."""
        part = rows_of(x)
        rows, columns, inverse = self.cast_part(part, operand, boundary, buffers)
        if boundary is None:
            return tuple(x.shape), (rows, inverse, columns, inverse)
        whole = boundary.whole(rows.view(x.shape))
        rows = rows_of(whole)
        return tuple(whole.shape), (rows, inverse, transposed(rows), inverse)

    def cast_part(
        self,
        part: Tensor,
        operand: str,
        boundary: Boundary | None,
        buffers: Buffers,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """part [n, X] -> rows, columns (empty under a boundary), inverse [1]."""
        found = largest(part)
        if boundary is not None:
            found = boundary.largest(found)
        return cast(part, found, self.is_e5m2(operand), self.options.power_of_two, True, boundary is None)

    def is_e5m2(self, operand: str) -> bool:
        """Whether the operand's format is E5M2."""
        return operand == GRADIENT and self.options.gradient == E5M2


class Delayed(Tensorwise):
    """One scale for a tensor, from the largest absolute values in the last steps: one pass over the tensor."""

    def cast_part(
        self, part: Tensor, operand: str, boundary: Boundary | None, buffers: Buffers
    ) -> tuple[Tensor, Tensor, Tensor]:
        """part [n, X] -> rows, columns (empty under a boundary), inverse [1]."""
        backward, columns = operand == GRADIENT, boundary is None
        scale, statistic = buffers[scale_name(operand)], buffers[operand]
        return cast_scaled(part, scale, statistic, self.is_e5m2(operand), backward, True, columns)


class Rowwise(Products):
    """A scale for each row of an operand. Rows and columns have different scales, so parts are gathered in bf16."""

    line, block = ROW, ROW

    def cast(self, weight: Tensor, buffers: Buffers) -> tuple[Tensor, ...]:
        """Rows [O, I] with inverses [O], columns [I, O] with inverses [I]."""
        return _single(cast_rowwise(weight[None], self.options.power_of_two))

    def quantised(
        self,
        x: Tensor,
        operand: str,
        boundary: Boundary | None,
        buffers: Buffers,
    ) -> tuple[tuple[int, ...], Quantised]:
        """Rows with inverses [N], columns with inverses [X]."""
        whole = x if boundary is None else boundary.whole(x)
        return tuple(whole.shape), _single(cast_rowwise(rows_of(whole)[None], self.options.power_of_two))


def _single(found: Quantised) -> Quantised:
    rows, row_inverses, columns, column_inverses = found
    return rows[0], row_inverses[0], columns[0], column_inverses[0]


class Blockwise(Products):
    """A scale for 128 consecutive numbers of a row, and for 128 x 128 numbers of a weight."""

    line, block = LINES, BLOCKS
    fast = False

    def cast(self, weight: Tensor, buffers: Buffers) -> tuple[Tensor, ...]:
        """Rows [O, I] and columns [I, O] with the inverses of their blocks."""
        return cast_blocks(weight)

    def quantised(
        self,
        x: Tensor,
        operand: str,
        boundary: Boundary | None,
        buffers: Buffers,
    ) -> tuple[tuple[int, ...], Quantised]:
        """Rows [P, X] and columns [X, P] with the inverses of their lines."""
        whole = x if boundary is None else boundary.whole(x)
        return tuple(whole.shape), cast_lines(rows_of(whole))
