"""The products of experts by Transformer Engine: suppliers of `Experts.product`, one for each recipe.

M rows in the order of e groups, I inputs, O outputs; `mplug_te.groups` describes quantised groups. Each product of a
group is one of cuBLAS; Transformer Engine spreads them over streams.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mplug_nn import (
    DelayedScaling,
    GroupedProduct,
    Operand,
    Sink,
    aligned,
    fake,
    keep_max,
    keep_max_in_backward,
    operator,
)
from mplug_te.casts import ALIGNED, BLOCK
from mplug_te.groups import (
    Group,
    blocks_of,
    cast_expert_blocks,
    cast_experts,
    cast_group_blocks,
    cast_groups,
    counts_of,
    groups_of,
    lines_of,
    part_of,
)
from mplug_te.library import library
from mplug_te.products import operand
from mplug_te.recipes import BLOCKWISE, DELAYED, GRADIENT, INPUT, TENSORWISE, Options

Buffers = Mapping[str, Tensor]

# torch reads an operator's schema from its annotated arguments.


@operator("mplug_te::multiply_groups")
def multiply_groups(
    weight: Tensor,
    of_weight: Tensor,
    weight_format: str,
    rows: Tensor,
    of_rows: Tensor,
    rows_format: str,
    counts: Tensor,
    num_rows: int,
    blocks: bool,
    precise: bool,
    dtype: torch.dtype,
) -> Tensor:
    """fp8 rows [Q, K] times the transposed matrix of their group, of weight [e, N, K] -> [M, N].

    Rows after the groups are arbitrary. `precise`: partial sums are added in fp32 registers.
    """
    y = rows.new_empty((num_rows, weight.shape[1]), dtype=dtype)
    groups = groups_of(counts, BLOCK if blocks else ALIGNED)
    if not groups:
        return y
    width, left, right = rows.shape[1], [], []
    if not blocks:
        of_weight, of_rows = _apart(of_weight), _apart(of_rows)
    for group in groups:
        inverses = of_weight[group.number] if blocks else _one(of_weight, group)
        left.append(operand(weight[group.number], inverses, weight_format, blocks))
        if blocks:  # the lines of the inverses have padding, so the product has it too
            right.append(operand(rows[group.whole], lines_of(of_rows, group, width), rows_format, False))
        else:
            own = rows[group.begin : group.begin + group.rows]
            right.append(operand(own, _one(of_rows, group), rows_format, False))
    if not blocks or all(group.rows == group.padded for group in groups):
        _multiply(left, right, [y[group.own] for group in groups], use_split_accumulator=precise)
        return y
    whole = y.new_empty((groups[-1].whole.stop, y.shape[1]))
    _multiply(left, right, [whole[group.whole] for group in groups], use_split_accumulator=precise)
    counts_with, counts_without = [group.padded for group in groups], [group.rows for group in groups]
    library().tex.fused_multi_row_unpadding(whole, y[: groups[-1].own.stop], counts_with, counts_without)
    return y


@fake("mplug_te::multiply_groups")
def _(
    weight: Tensor,
    of_weight: Tensor,
    weight_format: str,
    rows: Tensor,
    of_rows: Tensor,
    rows_format: str,
    counts: Tensor,
    num_rows: int,
    blocks: bool,
    precise: bool,
    dtype: torch.dtype,
) -> Tensor:
    return rows.new_empty((num_rows, weight.shape[1]), dtype=dtype)


@operator("mplug_te::add_multiplied_groups", mutates_args=("total", "stale"))
def add_multiplied_groups(
    total: Tensor,
    stale: Tensor,
    a: Tensor,
    of_a: Tensor,
    a_format: str,
    b: Tensor,
    of_b: Tensor,
    b_format: str,
    counts: Tensor,
    blocks: bool,
) -> None:
    """total [e, O, I] += columns b [Q O] times columns a [Q I] transposed, for each group.

    If `stale` is true, the products overwrite the total, and `stale` becomes false.
    """
    groups = groups_of(counts, BLOCK if blocks else ALIGNED)

    def columns(x: Tensor, inverses: Tensor, width: int, format_name: str) -> list[Any]:
        inverses = inverses if blocks else _apart(inverses)
        of_groups = [inverses[blocks_of(group)] if blocks else _one(inverses, group) for group in groups]
        pairs = zip(groups, of_groups, strict=True)
        return [operand(part_of(x, group, width), one, format_name, False) for group, one in pairs]

    left, right = columns(a, of_a, total.shape[2], a_format), columns(b, of_b, total.shape[1], b_format)
    _add(total, stale, groups, left, right, use_split_accumulator=True)


@operator("mplug_te::half_groups")
def half_groups(weight: Tensor, x: Tensor, counts: Tensor, transposed: bool) -> Tensor:
    """x [M, I] times the transposed matrix of each row's group, of weight [e, O, I] -> [M, O]; in bf16 or fp16.

    Without `transposed`: x [M, O] times the matrix -> [M, I]. Rows after the groups are arbitrary.
    """
    y = _empty_half(weight, x, transposed)
    groups, weight, x = groups_of(counts), weight.contiguous(), x.contiguous()
    if groups:
        left, right = [weight[group.number] for group in groups], [x[group.own] for group in groups]
        _multiply(left, right, [y[group.own] for group in groups], layout="TN" if transposed else "NN")
    return y


@fake("mplug_te::half_groups")
def _(weight: Tensor, x: Tensor, counts: Tensor, transposed: bool) -> Tensor:
    return _empty_half(weight, x, transposed)


def _empty_half(weight: Tensor, x: Tensor, transposed: bool) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[1 if transposed else 2]))


@operator("mplug_te::add_half_groups", mutates_args=("total", "stale"))
def add_half_groups(total: Tensor, stale: Tensor, x: Tensor, grad_y: Tensor, counts: Tensor) -> None:
    """total [e, O, I] += grad_yᵀ x of each group, accumulated in total's dtype; `stale` as above."""
    groups, x, grad_y = groups_of(counts), x.contiguous(), grad_y.contiguous()
    left, right = [x[group.own] for group in groups], [grad_y[group.own] for group in groups]
    _add(total, stale, groups, left, right, layout="NT")


def _apart(inverses: Tensor) -> Tensor:
    """inverses [e] -> [e, 4] with the inverses in the first column: cuBLAS needs addresses of multiples of 16 bytes."""
    apart = inverses.new_empty((len(inverses), 4))
    apart[:, 0] = inverses
    return apart


def _one(apart: Tensor, group: Group) -> Tensor:
    return apart[group.number, :1]


def _multiply(left: list[Any], right: list[Any], out: list[Tensor], **named: Any) -> None:
    rows = [len(one) for one in out]
    none: list[Any] = [None] * len(out)
    library().extensions.general_grouped_gemm(left, right, out, none, out[0].dtype, m_splits=rows, **named)


def _add(
    total: Tensor, stale: Tensor, groups: Sequence[Group], left: list[Any], right: list[Any], **named: Any
) -> None:
    own = aligned(total)
    accumulate = not bool(stale)
    stale.fill_(False)
    if not accumulate and len(groups) < len(own):
        filled = {group.number for group in groups}
        for number in range(len(own)):
            if number not in filled:
                own[number].zero_()
    if groups:
        _multiply(left, right, [own[group.number] for group in groups], accumulate=accumulate, **named)
    if own is not total:
        total.copy_(own)


class HalfGroups(GroupedProduct):
    """Products in bf16 or fp16, accumulated in fp32."""

    def forward(
        self, rows: Tensor, weight: Operand, ends: Tensor, buffers: Buffers
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """y = x Wᵀ; it saves x."""
        counts = counts_of(ends)
        return half_groups(weight.values, rows, counts, True), (rows, counts)

    def dgrad(
        self,
        grad_y: Tensor,
        weight: Operand,
        saved: tuple[Tensor, ...],
        ends: Tensor,
        buffers: Buffers,
        needs_rows: bool,
    ) -> tuple[Tensor | None, tuple[Tensor, ...]]:
        """grad_x = grad_y W."""
        rows, counts = saved
        grad_rows = half_groups(weight.values, grad_y, counts, False) if needs_rows else None
        return grad_rows, (grad_y, rows)

    def wgrad(self, operands: tuple[Tensor, ...], sink: Sink, ends: Tensor, buffers: Buffers) -> None:
        """grad_yᵀ x."""
        grad_y, rows = operands
        add_half_groups(*sink, rows, grad_y, counts_of(ends))


@dataclass(frozen=True)
class TensorwiseGroups(GroupedProduct):
    """FP8 products; every group of rows and every expert's matrix has one scale, from its largest absolute value."""

    forward_format: str
    gradient_format: str
    power_of_two: bool

    def cast(self, weight: Tensor, buffers: Buffers) -> tuple[Tensor, ...]:
        """Rows [e, O, I], columns [e, I, O] and inverses [e]."""
        return cast_experts(weight, self.forward_format, self.power_of_two)

    def forward(
        self, rows: Tensor, weight: Operand, ends: Tensor, buffers: Buffers
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """y = x Wᵀ; it saves the columns of x, and the numbers of rows on the CPU."""
        counts = counts_of(ends)
        numbers, columns, inverses = self._quantised(rows, INPUT, counts, buffers)
        y = self._times(weight.casts[0], weight, numbers, inverses, self.forward_format, counts, rows, False)
        return y, (columns, inverses, counts)

    def dgrad(
        self,
        grad_y: Tensor,
        weight: Operand,
        saved: tuple[Tensor, ...],
        ends: Tensor,
        buffers: Buffers,
        needs_rows: bool,
    ) -> tuple[Tensor | None, tuple[Tensor, ...]]:
        """grad_x = grad_y W; the operands of `wgrad` are the columns of grad_y and of x."""
        *of_input, counts = saved
        numbers, columns, inverses = self._quantised(grad_y, GRADIENT, counts, buffers)
        operands = (columns, inverses, *of_input)
        if not needs_rows:
            return None, operands
        form, matrices = self.gradient_format, weight.casts[1]
        return self._times(matrices, weight, numbers, inverses, form, counts, grad_y, True), operands

    def wgrad(self, operands: tuple[Tensor, ...], sink: Sink, ends: Tensor, buffers: Buffers) -> None:
        """grad_yᵀ x."""
        columns, inverses, of_input, input_inverses = operands
        total, stale = sink
        a, b = (of_input, input_inverses, self.forward_format), (columns, inverses, self.gradient_format)
        add_multiplied_groups(total, stale, *a, *b, counts_of(ends), False)

    def _quantised(self, x: Tensor, operand: str, counts: Tensor, buffers: Buffers) -> tuple[Tensor, Tensor, Tensor]:
        """x [M, X] -> rows [Q, X], columns [Q X], inverses [e]."""
        return cast_groups(x, counts, None, self._format(operand), self.power_of_two)[:3]

    def _format(self, operand: str) -> str:
        return self.forward_format if operand == INPUT else self.gradient_format

    def _times(
        self,
        matrices: Tensor,
        weight: Operand,
        numbers: Tensor,
        inverses: Tensor,
        format_name: str,
        counts: Tensor,
        x: Tensor,
        precise: bool,
    ) -> Tensor:
        """The rows of x, quantised, times the matrices [e, N, K] of their groups, transposed -> [M, N]."""
        left = matrices, weight.casts[2], self.forward_format
        right = numbers, inverses, format_name
        return multiply_groups(*left, *right, counts, x.shape[0], False, precise, x.dtype)


@dataclass(frozen=True)
class DelayedGroups(TensorwiseGroups):
    """FP8 products whose scales of rows and gradients come from the largest absolute values of the last steps.

    The rows of all experts have one scale. A matrix is cast once for each of its versions, so its scale is its own.
    """

    def _quantised(self, x: Tensor, operand: str, counts: Tensor, buffers: Buffers) -> tuple[Tensor, Tensor, Tensor]:
        scale = buffers[DelayedScaling.scale_name(operand)]
        rows, columns, inverses, largest = cast_groups(x, counts, scale, self._format(operand), False)
        keep = keep_max if operand == INPUT else keep_max_in_backward
        keep(buffers[operand], largest.view(()))
        return rows, columns, inverses


@dataclass(frozen=True)
class BlockwiseGroups(GroupedProduct):
    """FP8 products with a scale for 128 consecutive numbers of rows, and for 128 x 128 numbers of a matrix."""

    format_name: str
    power_of_two: bool

    def cast(self, weight: Tensor, buffers: Buffers) -> tuple[Tensor, ...]:
        """Rows [e, O, I] with their inverses, columns [e, I, O] with theirs."""
        return cast_expert_blocks(weight, self.format_name, self.power_of_two)

    def forward(
        self, rows: Tensor, weight: Operand, ends: Tensor, buffers: Buffers
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """y = x Wᵀ; it saves the columns of x, and the numbers of rows on the CPU."""
        counts = counts_of(ends)
        numbers, inverses, *columns = cast_group_blocks(rows, counts, self.format_name, self.power_of_two)
        return self._times(weight.casts[:2], numbers, inverses, counts, rows), (*columns, counts)

    def dgrad(
        self,
        grad_y: Tensor,
        weight: Operand,
        saved: tuple[Tensor, ...],
        ends: Tensor,
        buffers: Buffers,
        needs_rows: bool,
    ) -> tuple[Tensor | None, tuple[Tensor, ...]]:
        """grad_x = grad_y W; the operands of `wgrad` are the columns of grad_y and of x."""
        *of_input, counts = saved
        numbers, inverses, *columns = cast_group_blocks(grad_y, counts, self.format_name, self.power_of_two)
        operands = (*columns, *of_input)
        if not needs_rows:
            return None, operands
        return self._times(weight.casts[2:], numbers, inverses, counts, grad_y), operands

    def wgrad(self, operands: tuple[Tensor, ...], sink: Sink, ends: Tensor, buffers: Buffers) -> None:
        """grad_yᵀ x."""
        columns, inverses, of_input, input_inverses = operands
        a, b = (of_input, input_inverses, self.format_name), (columns, inverses, self.format_name)
        total, stale = sink
        add_multiplied_groups(total, stale, *a, *b, counts_of(ends), True)

    def _times(
        self, matrices: tuple[Tensor, ...], numbers: Tensor, inverses: Tensor, counts: Tensor, x: Tensor
    ) -> Tensor:
        left = matrices[0], matrices[1], self.format_name
        right = numbers, inverses, self.format_name
        return multiply_groups(*left, *right, counts, x.shape[0], True, True, x.dtype)


def groups_by(name: str, options: Options) -> GroupedProduct:
    """The grouped products by a recipe; without one, in half precision."""
    if name == BLOCKWISE:
        return BlockwiseGroups(options.forward, options.power_of_two)
    if name in (TENSORWISE, DELAYED):
        kind = DelayedGroups if name == DELAYED else TensorwiseGroups
        return kind(options.forward, options.gradient, options.power_of_two)
    return HalfGroups()
