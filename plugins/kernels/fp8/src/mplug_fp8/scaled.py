"""The products of a linear layer from operands that a recipe quantises (`products`).

N rows of all ranks, n of this rank, I inputs, O outputs, P padded rows. `rows` and `columns` are fp8 numbers and their
transpose (see `emulation`). The three products read operands whose contracted dimension is contiguous:

    forward   y [N, O]       = rows of x [N, I] times rows of the weight [O, I]
    dgrad     grad_x [N, I]  = rows of grad_y [N, O] times columns of the weight [I, O]
    wgrad     grad_w [O, I]  = columns of grad_y [O, P] times columns of x [I, P]

What forward saves of x:

    ranks gather it (column-parallel)   this rank's part, as it travels; backward gathers it again
    `keeps_input`                       x as it comes; backward casts its columns
    otherwise                           its columns, which have half the bytes of x in bf16

If a strategy has chunked collectives, the products run beside them (`overlap`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from mplug_fp8.operators import TENSOR, add_multiplied, multiply, rows_of, transposed
from mplug_fp8.overlap import gathered_dgrad, gathered_product, summed_backward, summed_product
from mplug_fp8.recipes import GRADIENT, INPUT, Options
from mplug_nn import Boundary, Narrow, Operand, Product, Sink, collectives_named

Buffers = Mapping[str, Tensor]


class Numbers(NamedTuple):
    """fp8 numbers [M, K] and their inverses."""

    values: Tensor
    inverse: Tensor


class Quantised(NamedTuple):
    """The rows and the columns of an operand; the content of one that is not wanted is arbitrary."""

    rows: Numbers
    columns: Numbers


ROWS, COLUMNS = "rows", "columns"
BOTH = (ROWS, COLUMNS)


@dataclass(frozen=True)
class Products(Product):
    """The three products, from operands that a recipe quantises."""

    options: Options
    keeps_input: bool = False
    """Whether forward saves a whole input as it comes: for sites whose input backward needs in bf16 anyway."""
    keeps_weights: bool = False
    """Whether the host keeps fp8 copies of weights; else every pass casts what it reads."""
    line, block = TENSOR, TENSOR
    """The scalings of activations and gradients, and of weights."""
    fast = True
    """Whether forward sums in the tensor cores' narrower format, which is faster. Gradients never do."""

    def measured(self, x: Tensor, boundary: Boundary | None) -> tuple[Tensor, ...]:
        """What `quantised` needs besides an operand x [..., n, X], of all ranks; nothing by default."""
        return ()

    def quantised(
        self, x: Tensor, measured: tuple[Tensor, ...], operand: str, buffers: Buffers, wanted: tuple[str, ...] = BOTH
    ) -> Quantised:
        """x [..., X] -> rows [N, X] and columns [X, P]."""
        raise NotImplementedError

    def input_columns(self, x: Tensor, measured: tuple[Tensor, ...], buffers: Buffers) -> Numbers:
        """The columns of an input [..., I] whose rows forward has cast."""
        return self.quantised(x, measured, INPUT, buffers, (COLUMNS,)).columns

    def weight_rows(self, weight: Operand) -> Numbers:
        """Rows [O, I] of the weight."""
        raise NotImplementedError

    def weight_columns(self, weight: Operand) -> Numbers:
        """Columns [I, O] of the weight."""
        raise NotImplementedError

    def forward(
        self, x: Tensor, weight: Operand, narrow: Narrow, buffers: Buffers
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """x [..., n, I] -> (this rank's part of x Wᵀ, what `dgrad` needs of x)."""
        matrix, before = self.weight_rows(weight), narrow.before
        if before is not None:
            sent = self._sent(x, INPUT, before, buffers)
            return narrow.scattered(self._gathered(x, sent, matrix, before, buffers)), sent
        measured = self.measured(x, None)
        wanted = (ROWS,) if self.keeps_input else BOTH
        whole = self.quantised(x, measured, INPUT, buffers, wanted)
        y = self._summed(whole.rows, x.shape, matrix, narrow.after, self.fast)
        return y, ((x, *measured) if self.keeps_input else whole.columns)

    def dgrad(
        self,
        grad_y: Tensor,
        weight: Operand,
        saved: tuple[Tensor, ...],
        narrow: Narrow,
        buffers: Buffers,
        needs_x: bool,
    ) -> tuple[Tensor | None, tuple[Tensor, ...]]:
        """grad_y -> (the gradient of x, the columns of grad_y, those of x or the part of x that travels)."""
        if narrow.after is not None:
            grad_x, columns = self._dgrad_of_part(grad_y, weight, narrow.after, buffers, needs_x)
            grad_x = None if grad_x is None else narrow.scattered_gradient(grad_x)
        else:
            rows, columns = self.quantised(grad_y, self.measured(grad_y, None), GRADIENT, buffers)
            grad_x = None
            if needs_x:
                grad_x = self._summed(rows, grad_y.shape, self.weight_columns(weight), narrow.before, False)
        if narrow.before is None and self.keeps_input:
            x, *measured = saved
            saved = self.input_columns(x, tuple(measured), buffers)
        return grad_x, (*columns, *saved)

    def wgrad(
        self,
        operands: tuple[Tensor, ...],
        sink: Sink | None,
        narrow: Narrow,
        buffers: Buffers,
    ) -> Tensor | None:
        """Add the weight's gradient [O, I] to the sink, or return it in bf16."""
        columns, inverse, *of_x = operands
        if narrow.before is not None:
            whole = self._whole(narrow.before.whole(of_x[0]), tuple(of_x), INPUT, buffers, (COLUMNS,))
            of_x = [*whole.columns]
        x_columns, x_inverse = of_x
        if sink is None:
            return multiply(columns, x_columns, inverse, x_inverse, self.line, self.line, False)
        add_multiplied(*sink, columns, x_columns, inverse, x_inverse, self.line)
        return None

    def backward(
        self,
        grad_y: Tensor,
        weight: Operand,
        saved: tuple[Tensor, ...],
        sink: Sink | None,
        narrow: Narrow,
        buffers: Buffers,
        needs_x: bool,
    ) -> tuple[Tensor | None, Tensor | None]:
        """One operator for both gradients of a column-parallel product whose collectives overlap."""
        before = narrow.before
        if before is None or not before.chunked or narrow.after is not None or not needs_x:
            return super().backward(grad_y, weight, saved, sink, narrow, buffers, needs_x)
        rows, columns = self.quantised(grad_y, self.measured(grad_y, None), GRADIENT, buffers)
        x, x_inverse = saved if self._travels_in_fp8 else (saved[0], rows.inverse)
        own = sink or _own_sink(grad_y, x)
        matrix, power, chunked = self.weight_columns(weight), self.options.power_of_two, before.chunked
        operands = *rows, *columns, _samples(x), x_inverse, *matrix
        grad_x = summed_backward(*own, *operands, self.line, self.block, power, chunked)
        return grad_x.view(x.shape), None if sink else own.total

    def of_numbers(self, numbers: Tensor, inverse: Tensor, weight: Operand, narrow: Narrow, buffers: Buffers) -> Tensor:
        """This rank's part of the product of an input whose rows are known: numbers [..., n, I] with one inverse."""
        matrix, before = self.weight_rows(weight), narrow.before
        if before is not None:
            return narrow.scattered(self._gathered(numbers, (numbers, inverse), matrix, before, buffers))
        return self._summed(Numbers(rows_of(numbers), inverse), numbers.shape, matrix, narrow.after, self.fast)

    # Operands that ranks exchange.

    @property
    def _travels_in_fp8(self) -> bool:
        return self.line == TENSOR

    def _sent(self, part: Tensor, operand: str, boundary: Boundary, buffers: Buffers) -> tuple[Tensor, ...]:
        """What ranks gather of an operand [..., n, X], for products that read rows and columns.

        Its numbers in its shape and their inverse, if it has one scale; else the operand itself.
        """
        if not self._travels_in_fp8:
            return (part,)
        rows, _ = self.quantised(part, self.measured(part, boundary), operand, buffers, (ROWS,))
        return rows.values.view(part.shape), rows.inverse

    def _whole(
        self, whole: Tensor, sent: tuple[Tensor, ...], operand: str, buffers: Buffers, wanted: tuple[str, ...]
    ) -> Quantised:
        """The gathered first tensor of `sent` -> rows and columns."""
        if not self._travels_in_fp8:
            return self.quantised(whole, (), operand, buffers, wanted)
        rows, inverse = rows_of(whole), sent[1]
        columns = transposed(rows) if COLUMNS in wanted else rows
        return Quantised(Numbers(rows, inverse), Numbers(columns, inverse))

    def _gathered(
        self, x: Tensor, sent: tuple[Tensor, ...], matrix: Numbers, before: Boundary, buffers: Buffers
    ) -> Tensor:
        """gathered(x [..., n, I]) Wᵀ -> [..., N, O]."""
        if not before.chunked:
            whole = before.whole(sent[0])
            rows, _ = self._whole(whole, sent, INPUT, buffers, (ROWS,))
            return self._summed(rows, whole.shape, matrix, None, self.fast)
        if self._travels_in_fp8:
            values, inverse = sent
        else:
            rows, _ = self.quantised(x, (), INPUT, buffers, (ROWS,))
            values, inverse = rows.values[: rows_of(x).shape[0]].view(x.shape), self._by_row(rows.inverse, x)
        y = gathered_product(_samples(values), inverse, *matrix, self.line, self.block, self.fast, before.chunked)
        return y.view(*x.shape[:-2], *y.shape[1:])

    def _by_row(self, inverse: Tensor, x: Tensor) -> Tensor:
        """Inverses [P] or [I / 128, P] of x [..., n, I] -> [B, n, *]."""
        by_row = (inverse[:, None] if inverse.dim() == 1 else inverse.t())[: rows_of(x).shape[0]]
        return by_row.reshape(-1, x.shape[-2], by_row.shape[1]).contiguous()

    def _summed(
        self, rows: Numbers, shape: tuple[int, ...], matrix: Numbers, boundary: Boundary | None, fast: bool
    ) -> Tensor:
        """rows of an operand of `shape` [..., N, K] times a matrix [M, K] -> this rank's part of the sum over ranks."""
        if boundary is None or not boundary.chunked:
            y = multiply(rows.values, matrix.values, rows.inverse, matrix.inverse, self.line, self.block, fast)
            y = _like(y, shape)
            return y if boundary is None else boundary.summed(y)
        samples, length = _num_rows(shape) // shape[-2], shape[-2]
        y = summed_product(*rows, samples, length, *matrix, self.line, self.block, fast, boundary.chunked)
        return y.view(*shape[:-2], *y.shape[1:])

    def _dgrad_of_part(
        self, part: Tensor, weight: Operand, after: Boundary, buffers: Buffers, needs_x: bool
    ) -> tuple[Tensor | None, Numbers]:
        """The gradient of this rank's part of y -> (the gradient of the whole x, the columns of the whole gradient)."""
        sent = self._sent(part, GRADIENT, after, buffers)
        if needs_x and after.chunked and collectives_named(after.chunked).num_parts > 1:
            inverse = sent[1] if self._travels_in_fp8 else part.new_ones(1, dtype=torch.float32)
            matrix, power, chunked = self.weight_columns(weight), self.options.power_of_two, after.chunked
            grad_x, whole = gathered_dgrad(_samples(sent[0]), inverse, *matrix, self.line, self.block, power, chunked)
            _, columns = self._whole(whole, sent, GRADIENT, buffers, (COLUMNS,))
            return grad_x.view(*part.shape[:-2], *grad_x.shape[1:]), columns
        whole = after.whole(sent[0])
        rows, columns = self._whole(whole, sent, GRADIENT, buffers, BOTH)
        if not needs_x:
            return None, columns
        return self._summed(rows, whole.shape, self.weight_columns(weight), None, False), columns


def _num_rows(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape[:-1]:
        count *= size
    return count


def _like(y: Tensor, shape: tuple[int, ...]) -> Tensor:
    """y [P, O] without padding, in the leading dimensions of an operand."""
    return y[: _num_rows(shape)].view(*shape[:-1], y.shape[1])


def _samples(x: Tensor) -> Tensor:
    """x [..., n, X] -> [B, n, X]."""
    return x.reshape(-1, *x.shape[-2:])


def _own_sink(grad_y: Tensor, x: Tensor) -> Sink:
    """A sink for a gradient that is returned in bf16: its memory has no values yet."""
    total = x.new_empty((grad_y.shape[-1], x.shape[-1]), dtype=torch.bfloat16)
    return Sink(total, torch.ones((), dtype=torch.bool, device="cpu"))
