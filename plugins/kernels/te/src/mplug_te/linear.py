"""The products of linear layers: suppliers of `Linear.product`, one for each recipe.

R ranks, I inputs, O outputs, n rows of a rank; x [..., n, I]. `mplug_te.casts` describes quantised tensors.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from mplug_nn import Boundary, DelayedScaling, Narrow, Operand, Product, Sink, keep_max, keep_max_in_backward
from mplug_te.casts import cast, cast_blocks, largest_of, scale_of, transposed
from mplug_te.products import (
    Quantised,
    add_half_gradient,
    add_multiplied,
    half_gradient,
    half_product,
    multiply,
)
from mplug_te.recipes import BLOCKWISE, DELAYED, GRADIENT, INPUT, Options

Buffers = Mapping[str, Tensor]


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _like(rows: Tensor, whole: Tensor) -> Tensor:
    """rows [N, X] -> [..., n, X], with the leading dimensions of another tensor."""
    return rows.view(*whole.shape[:-1], rows.shape[-1])


class HalfProduct(Product):
    """Products in bf16 or fp16, accumulated in fp32. A gathered input is gathered again for the weight's gradient."""

    def forward(
        self, x: Tensor, weight: Operand, narrow: Narrow, buffers: Buffers
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """y = x Wᵀ; it saves this rank's x."""
        whole = narrow.gathered(x)
        return narrow.scattered(_like(half_product(weight.values, _rows(whole), True), whole)), (x,)

    def dgrad(
        self,
        grad_y: Tensor,
        weight: Operand,
        saved: tuple[Tensor, ...],
        narrow: Narrow,
        buffers: Buffers,
        needs_x: bool,
    ) -> tuple[Tensor | None, tuple[Tensor, ...]]:
        """grad_x = grad_y W."""
        grad_y = narrow.gathered_gradient(grad_y)
        operands = (grad_y, *saved)
        if not needs_x:
            return None, operands
        grad_x = _like(half_product(weight.values, _rows(grad_y), False), grad_y)
        return narrow.scattered_gradient(grad_x), operands

    def wgrad(self, operands: tuple[Tensor, ...], sink: Sink | None, narrow: Narrow, buffers: Buffers) -> Tensor | None:
        """grad_yᵀ x."""
        grad_y, x = _rows(operands[0]), _rows(narrow.gathered(operands[1]))
        if sink is None:
            return half_gradient(x, grad_y)
        add_half_gradient(sink.total, sink.stale, x, grad_y)
        return None


@dataclass(frozen=True)
class TensorwiseProduct(Product):
    """FP8 products; every operand has one scale, from its largest absolute value.

    Between ranks, fp8 numbers travel: all ranks quantise with the scale of the whole operand. A gathered input is
    gathered again for the weight's gradient, instead of being saved.
    """

    forward_format: str
    gradient_format: str
    power_of_two: bool

    def cast(self, weight: Tensor, buffers: Buffers) -> tuple[Tensor, ...]:
        """Rows [O, I], columns [I, O] and the inverse [1]."""
        return cast(weight, None, self.forward_format, self.power_of_two, True)[:3]

    def forward(
        self, x: Tensor, weight: Operand, narrow: Narrow, buffers: Buffers
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """y = x Wᵀ; it saves x in fp8: its columns, or this rank's rows if the input is gathered."""
        rows, columns, inverse = self._quantised(x, INPUT, narrow.before, buffers)
        kept, whole = columns, rows
        if narrow.before is not None:
            kept, whole = rows, narrow.before.whole(rows)
        return narrow.scattered(self.multiplied(whole, inverse, weight, x.dtype)), (kept, inverse)

    def multiplied(self, rows: Tensor, inverse: Tensor, weight: Operand, dtype: torch.dtype) -> Tensor:
        """The product of the whole input [..., N, I], which is fp8 numbers with their inverse."""
        return self._times(weight.casts[0], weight, rows, inverse, self.forward_format, dtype, precise=False)

    def dgrad(
        self,
        grad_y: Tensor,
        weight: Operand,
        saved: tuple[Tensor, ...],
        narrow: Narrow,
        buffers: Buffers,
        needs_x: bool,
    ) -> tuple[Tensor | None, tuple[Tensor, ...]]:
        """grad_x = grad_y W; the operands of `wgrad` are in fp8."""
        rows, columns, inverse = self._quantised(grad_y, GRADIENT, narrow.after, buffers)
        if narrow.after is not None:
            rows = narrow.after.whole(rows)
            columns = transposed(_rows(rows))
        operands = (columns, inverse, *saved)
        if not needs_x:
            return None, operands
        columns_of_weight = weight.casts[1]
        grad_x = self._times(columns_of_weight, weight, rows, inverse, self.gradient_format, grad_y.dtype, precise=True)
        return narrow.scattered_gradient(grad_x), operands

    def wgrad(self, operands: tuple[Tensor, ...], sink: Sink | None, narrow: Narrow, buffers: Buffers) -> Tensor | None:
        """grad_yᵀ x."""
        of_gradient, gradient_inverse, kept, inverse = operands
        of_input = kept if narrow.before is None else transposed(_rows(narrow.before.whole(kept)))
        a = Quantised(of_input, inverse, self.forward_format)
        b = Quantised(of_gradient, gradient_inverse, self.gradient_format)
        if sink is None:
            return multiply(a, b, len(of_gradient), True, torch.bfloat16)
        add_multiplied(sink, a, b)
        return None

    def _times(
        self,
        values: Tensor,
        weight: Operand,
        rows: Tensor,
        inverse: Tensor,
        format_name: str,
        dtype: torch.dtype,
        precise: bool,
    ) -> Tensor:
        """rows [..., n, K] valuesᵀ, of the weight's rows or columns `values` [M, K] -> [..., n, M]."""
        a, b = Quantised(values, weight.casts[2], self.forward_format), Quantised(_rows(rows), inverse, format_name)
        return _like(multiply(a, b, len(b.values), precise, dtype), rows)

    def _quantised(
        self, x: Tensor, operand: str, boundary: Boundary | None, buffers: Buffers
    ) -> tuple[Tensor, Tensor, Tensor]:
        """x [..., n, X] -> rows of its shape, columns [X, P] (none before a gathering), inverse [1]."""
        format_name = self._format(operand)
        scale = None
        if boundary is not None:
            scale = scale_of(boundary.largest(largest_of(x)), format_name, self.power_of_two)
        rows, columns, inverse, _ = cast(_rows(x), scale, format_name, self.power_of_two, boundary is None)
        return rows.view(x.shape), columns, inverse

    def _format(self, operand: str) -> str:
        return self.forward_format if operand == INPUT else self.gradient_format


@dataclass(frozen=True)
class DelayedProduct(TensorwiseProduct):
    """FP8 products whose scales of inputs and gradients come from the largest absolute values of the last steps.

    So the cast reads its operand once. A weight is cast once for each of its versions, so its scale is its own.
    """

    def _quantised(
        self, x: Tensor, operand: str, boundary: Boundary | None, buffers: Buffers
    ) -> tuple[Tensor, Tensor, Tensor]:
        format_name, scale = self._format(operand), buffers[DelayedScaling.scale_name(operand)]
        rows, columns, inverse, largest = cast(_rows(x), scale, format_name, False, boundary is None)
        keep = keep_max if operand == INPUT else keep_max_in_backward
        keep(buffers[operand], largest.view(()))
        return rows.view(x.shape), columns, inverse


@dataclass(frozen=True)
class BlockwiseProduct(Product):
    """FP8 products with a scale for 128 consecutive numbers of activations, and for 128 x 128 numbers of a weight.

    Inputs and gradients are quantised along both dimensions. So activations are not quantised between ranks.
    """

    format_name: str
    power_of_two: bool

    def cast(self, weight: Tensor, buffers: Buffers) -> tuple[Tensor, ...]:
        """Rows [O, I] with their inverses, columns [I, O] with theirs."""
        return cast_blocks(weight, True, self.format_name, self.power_of_two, True, True)

    def forward(
        self, x: Tensor, weight: Operand, narrow: Narrow, buffers: Buffers
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """y = x Wᵀ; it saves the columns of x in fp8, or this rank's x if the input is gathered."""
        whole = narrow.gathered(x)
        rows, inverses, columns, of_columns = self._cast(whole, columns=narrow.before is None)
        y = self._times(weight.casts[:2], rows, inverses, whole)
        return narrow.scattered(y), ((columns, of_columns) if narrow.before is None else (x,))

    def dgrad(
        self,
        grad_y: Tensor,
        weight: Operand,
        saved: tuple[Tensor, ...],
        narrow: Narrow,
        buffers: Buffers,
        needs_x: bool,
    ) -> tuple[Tensor | None, tuple[Tensor, ...]]:
        """grad_x = grad_y W; the operands of `wgrad` are the columns of grad_y and what forward saved."""
        whole = narrow.gathered_gradient(grad_y)
        rows, inverses, columns, of_columns = self._cast(whole, rows=needs_x)
        operands = (columns, of_columns, *saved)
        if not needs_x:
            return None, operands
        return narrow.scattered_gradient(self._times(weight.casts[2:], rows, inverses, whole)), operands

    def wgrad(self, operands: tuple[Tensor, ...], sink: Sink | None, narrow: Narrow, buffers: Buffers) -> Tensor | None:
        """grad_yᵀ x."""
        of_gradient, gradient_inverses, *saved = operands
        if narrow.before is not None:
            saved = list(self._cast(narrow.before.whole(saved[0]), rows=False)[2:])
        a = Quantised(saved[0], saved[1], self.format_name)
        b = Quantised(of_gradient, gradient_inverses, self.format_name)
        if sink is None:
            return multiply(a, b, len(of_gradient), True, torch.bfloat16)
        add_multiplied(sink, a, b)
        return None

    def _cast(self, x: Tensor, rows: bool = True, columns: bool = True) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return cast_blocks(_rows(x), False, self.format_name, self.power_of_two, rows, columns)

    def _times(self, weight: tuple[Tensor, ...], rows: Tensor, inverses: Tensor, whole: Tensor) -> Tensor:
        """x [..., N, K] valuesᵀ, of the weight's quantised rows or columns [M, K] -> [..., N, M]."""
        values, of_values = weight
        a = Quantised(values, of_values, self.format_name, square=True)
        b = Quantised(rows, inverses, self.format_name)
        y = multiply(a, b, whole.shape[:-1].numel(), True, whole.dtype)
        return y.view(*whole.shape[:-1], len(values))


def product_of(name: str, options: Options) -> Product:
    """The products by a recipe of `mplug_te.recipes.NAMES`."""
    if name == BLOCKWISE:
        return BlockwiseProduct(options.forward, options.power_of_two)
    kind = DelayedProduct if name == DELAYED else TensorwiseProduct
    return kind(options.forward, options.gradient, options.power_of_two)
