"""The grouped product of experts, rowwise: each row is multiplied by the matrix of its group.

M rows, e groups, I inputs, O outputs, Q padded rows of all groups. torch's grouped fp8 product has a scale for each row
of an operand. The weights' gradient contracts the rows of each group, which must be a multiple of 16; so the columns of
every group are padded with zeros.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

import mplug_fp8.emulation as emulation
from mplug_fp8.emulation import E4M3, columns_of_groups
from mplug_fp8.operators import cast_rowwise
from mplug_fp8.recipes import Options
from mplug_nn import GroupedProduct, Operand, Sink, fake, operator

Buffers = Mapping[str, Tensor]


@dataclass(frozen=True)
class RowwiseGroups(GroupedProduct):
    """The three grouped products. Forward saves the columns of the rows, which have half their bytes in bf16."""

    options: Options

    def cast(self, weight: Tensor, buffers: Buffers) -> tuple[Tensor, ...]:
        """weight [e, O, I] -> rows [e, O, I] with inverses [e, O], columns [e, I, O] with inverses [e, I]."""
        return cast_rowwise(weight, self.options.power_of_two, True, True)

    def forward(
        self, rows: Tensor, weight: Operand, ends: Tensor, buffers: Buffers
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """rows [M, I] -> ([M, O], the columns of the rows, their inverses and the ends of their groups)."""
        numbers, inverse, *columns = cast_grouped(rows, ends, self.options.power_of_two)
        return multiply_grouped(numbers, weight.casts[0], inverse, weight.casts[1], ends, True), tuple(columns)

    def dgrad(
        self,
        grad_y: Tensor,
        weight: Operand,
        saved: tuple[Tensor, ...],
        ends: Tensor,
        buffers: Buffers,
        needs_rows: bool,
    ) -> tuple[Tensor | None, tuple[Tensor, ...]]:
        """grad_y [M, O] -> (the gradient of the rows, the columns of grad_y and of the rows)."""
        numbers, inverse, columns, column_inverse, _ = cast_grouped(grad_y, ends, self.options.power_of_two)
        operands = (columns, column_inverse, *saved)
        if not needs_rows:
            return None, operands
        return multiply_grouped(numbers, weight.casts[2], inverse, weight.casts[3], ends, False), operands

    def wgrad(self, operands: tuple[Tensor, ...], sink: Sink, ends: Tensor, buffers: Buffers) -> None:
        """Add the weights' gradient [e, O, I] to the sink."""
        columns, inverse, row_columns, row_inverse, column_ends = operands
        add_multiplied_columns(*sink, columns, row_columns, inverse, row_inverse, column_ends)


@operator("mplug_fp8::cast_grouped")
def cast_grouped(x: Tensor, ends: Tensor, power_of_two: bool) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """x [M, I], ends [e] -> rows [M, I] with inverses [M], columns [I, Q] with inverses [e, I], ends of columns [e]."""
    if not x.is_cuda:
        return emulation.cast_grouped(x, ends, power_of_two)
    import mplug_fp8.launch as launch

    return launch.cast_grouped(x.contiguous(), ends, power_of_two)


@fake("mplug_fp8::cast_grouped")
def _(x: Tensor, ends: Tensor, power_of_two: bool) -> Any:
    (m, i), e = x.shape, len(ends)
    rows, columns = x.new_empty((m, i), dtype=E4M3), x.new_empty((i, columns_of_groups(m, e)), dtype=E4M3)
    inverses = x.new_empty(m, dtype=torch.float32), x.new_empty((e, i), dtype=torch.float32)
    return rows, inverses[0], columns, inverses[1], torch.empty_like(ends)


@operator("mplug_fp8::multiply_grouped")
def multiply_grouped(a: Tensor, b: Tensor, a_inverse: Tensor, b_inverse: Tensor, ends: Tensor, fast: bool) -> Tensor:
    """a [M, K] times the transposed matrix of each row's group, b [e, N, K] -> bf16 [M, N], arbitrary after groups."""
    if not a.is_cuda:
        return emulation.multiply_grouped(a, b, a_inverse, b_inverse, ends).to(torch.bfloat16)
    if not len(a):
        return a.new_empty((0, b.shape[1]), dtype=torch.bfloat16)
    y: Tensor = torch._scaled_grouped_mm(
        a, b.mT, a_inverse, b_inverse, offs=ends, out_dtype=torch.bfloat16, use_fast_accum=fast
    )
    return y


@fake("mplug_fp8::multiply_grouped")
def _(a: Tensor, b: Tensor, *_: Any) -> Tensor:
    return a.new_empty((len(a), b.shape[1]), dtype=torch.bfloat16)


@operator("mplug_fp8::add_multiplied_columns", mutates_args=("total", "stale"))
def add_multiplied_columns(
    total: Tensor, stale: Tensor, a: Tensor, b: Tensor, a_inverse: Tensor, b_inverse: Tensor, ends: Tensor
) -> None:
    """total [e, O, I] += columns a [O, Q] times columns b [I, Q] transposed, for each group.

    The products overwrite a total that is `stale`. On a GPU torch rounds the products of a micro batch to bf16.
    """
    if a.is_cuda:
        import mplug_fp8.launch as launch

        products = torch._scaled_grouped_mm(
            a, b.t(), a_inverse.view(-1), b_inverse.view(-1), offs=ends, out_dtype=torch.bfloat16
        )
        # A group without rows has no product: its result is not written by every version of torch's kernel.
        own = total if total.is_contiguous() else total.contiguous()
        launch.add_groups(own, products, ends, bool(stale))
        if own is not total:
            total.copy_(own)
    else:
        products = emulation.multiply_columns(a, b, a_inverse, b_inverse, ends)
        total.copy_(products) if stale else total.add_(products)
    stale.fill_(False)


@register_flop_formula(torch.ops.mplug_fp8.multiply_grouped)
def _flops(a: tuple[int, ...], b: tuple[int, ...], *_: Any, **__: Any) -> int:
    return 2 * a[0] * a[1] * b[1]


@register_flop_formula(torch.ops.mplug_fp8.add_multiplied_columns)
def _flops_of_sum(total: tuple[int, ...], stale: Any, a: tuple[int, ...], *_: Any, **__: Any) -> int:
    return 2 * total[1] * total[2] * a[1]
