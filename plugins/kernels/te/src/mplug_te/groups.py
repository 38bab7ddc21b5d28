"""Casts and products of the groups of rows of experts by Transformer Engine, as torch operators.

M rows in the order of e groups, I inputs, O outputs. `mplug_te.casts` describes quantised tensors. Each group is a
tensor of its own, as in Transformer Engine: it has scales of its own, unless they are given. The columns of a group
[I, P] need a number of rows P that is a multiple of ALIGNED (of BLOCK, in blocks). So a cast inserts rows of zeros
after each group. Q rows have room for them, whatever the groups are:

    rows      [Q, I]; group after group, each with its rows of zeros; the last rows are arbitrary
    columns   [Q I]; group after group, each [I, P]; the last numbers are arbitrary

Transformer Engine 2.20 launches one product for each group on Hopper, so it needs the numbers of rows on the CPU:
`counts` [e] int64. Its kernels with these numbers on the device need cuBLAS 13.4.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor

from mplug_nn import fake, operator
from mplug_te.casts import ALIGNED, BLOCK, padded
from mplug_te.library import library, number_of

# torch reads an operator's schema from its annotated arguments.


class Group(NamedTuple):
    """A group that has rows: its number, its first row, its rows; with padding: its first row, its rows."""

    number: int
    start: int
    rows: int
    begin: int
    padded: int

    @property
    def own(self) -> slice:
        """Its rows, without padding before it."""
        return slice(self.start, self.start + self.rows)

    @property
    def whole(self) -> slice:
        """Its rows with padding."""
        return slice(self.begin, self.begin + self.padded)


def groups_of(counts: Tensor, multiple: int = 1) -> list[Group]:
    """The groups that have rows; `multiple`: that of the rows with padding."""
    found, start, begin = [], 0, 0
    for number, rows in enumerate(counts.tolist()):
        if rows:
            found.append(Group(number, start, rows, begin, padded(rows, multiple)))
        start, begin = start + rows, begin + padded(rows, multiple)
    return found


def room(rows: int, groups: int, multiple: int) -> int:
    """Enough padded rows for any groups of so many rows in all."""
    return padded(rows, multiple) + groups * multiple


@operator("mplug_te::counts_of")
def counts_of(ends: Tensor) -> Tensor:
    """ends [e], the indices after the last rows -> counts [e] int64 on the CPU, which waits for the device."""
    stops = ends.tolist()
    counts = [stop - start for start, stop in zip([0, *stops[:-1]], stops, strict=True)]
    return torch.tensor(counts, dtype=torch.int64, device="cpu")


@fake("mplug_te::counts_of")
def _(ends: Tensor) -> Tensor:
    return torch.empty(ends.shape, dtype=torch.int64, device="cpu")


def _padded(x: Tensor, groups: Sequence[Group]) -> Tensor:
    """x [M, I] with rows of zeros after each group, contiguous."""
    if all(group.rows == group.padded for group in groups):
        return x.contiguous()
    first = x[: groups[-1].own.stop].contiguous()
    whole = x.new_empty((groups[-1].whole.stop, x.shape[1]))
    counts = [group.rows for group in groups], [group.padded for group in groups]
    library().tex.fused_multi_row_padding(first, whole, *counts)
    return whole


# Casts, tensorwise.


@operator("mplug_te::cast_groups")
def cast_groups(
    x: Tensor,
    counts: Tensor,
    scale: Optional[Tensor],  # noqa: UP045 (torch reads it)
    format_name: str,
    power_of_two: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x [M, I] -> rows [Q, I], columns [Q I], inverses [e], largest absolute value [1] of the rows of all groups.

    Without a scale [1], each group has a scale of its own, and the last result is zero. The inverses of groups without
    rows are arbitrary.
    """
    rows, columns, inverses, largest = _empty(x, len(counts))
    groups, quantizer = groups_of(counts, ALIGNED), _quantizer(x, scale, largest.zero_(), format_name, power_of_two)
    whole, width = _padded(x, groups), x.shape[1]
    for group in groups:
        into = rows[group.whole], part_of(columns, group, width), inverses[group.number : group.number + 1]
        _cast(whole[group.whole], *into, quantizer)
    return rows, columns, inverses, largest


@fake("mplug_te::cast_groups")
def _(
    x: Tensor, counts: Tensor, scale: Any, format_name: str, power_of_two: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _empty(x, len(counts))


def _empty(x: Tensor, groups: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    i, q = x.shape[1], room(x.shape[0], groups, ALIGNED)
    rows, columns = x.new_empty((q, i), dtype=torch.uint8), x.new_empty(q * i, dtype=torch.uint8)
    return rows, columns, x.new_empty(groups, dtype=torch.float32), x.new_empty(1, dtype=torch.float32)


def part_of(columns: Tensor, group: Group, width: int) -> Tensor:
    """The columns of a group [I, P]."""
    start = group.begin * width
    return columns[start : start + group.padded * width].view(width, group.padded)


def _quantizer(x: Tensor, scale: Tensor | None, largest: Tensor, format_name: str, power_of_two: bool) -> Any:
    """A scale for each tensor, or a given one; a quantizer with a given one raises `largest` in every cast."""
    te, number = library().te, number_of(getattr(torch, format_name))
    if scale is not None:
        return te.Float8Quantizer(scale, largest, number, rowwise=True, columnwise=True)
    named: dict[str, Any] = {"rowwise": True, "columnwise": True, "force_pow_2_scales": power_of_two}
    return te.Float8CurrentScalingQuantizer(number, x.device, **named)


def _cast(x: Tensor, rows: Tensor, columns: Tensor, inverse: Tensor, quantizer: Any) -> None:
    """Write rows and columns of x [P, I]."""
    named: dict[str, Any] = {"fp8_scale_inv": inverse, "fp8_dtype": quantizer.dtype}
    into = library().te.Float8TensorStorage(data=rows, data_transpose=columns, **named)
    library().tex.quantize(x, quantizer, into, None)


@operator("mplug_te::cast_experts")
def cast_experts(weight: Tensor, format_name: str, power_of_two: bool) -> tuple[Tensor, Tensor, Tensor]:
    """weight [e, O, I] -> rows [e, O, I], columns [e, I, O], inverses [e]: a scale for each expert."""
    rows, columns, inverses = _empty_experts(weight)
    quantizer = _quantizer(weight, None, inverses, format_name, power_of_two)
    for number, matrix in enumerate(weight.contiguous()):
        _cast(matrix, rows[number], columns[number], inverses[number : number + 1], quantizer)
    return rows, columns, inverses


@fake("mplug_te::cast_experts")
def _(weight: Tensor, format_name: str, power_of_two: bool) -> tuple[Tensor, Tensor, Tensor]:
    return _empty_experts(weight)


def _empty_experts(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    e, o, i = weight.shape
    rows, columns = weight.new_empty((e, o, i), dtype=torch.uint8), weight.new_empty((e, i, o), dtype=torch.uint8)
    return rows, columns, weight.new_empty(e, dtype=torch.float32)


# Casts in blocks. The inverses of the rows of a group are [I / 128, P], those of its columns [P / 128, I].


@operator("mplug_te::cast_group_blocks")
def cast_group_blocks(
    x: Tensor, counts: Tensor, format_name: str, power_of_two: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x [M, I] -> rows [Q, I] with inverses [Q I / 128], columns [Q I] with inverses [Q / 128, I]."""
    rows, of_rows, columns, of_columns = _empty_blocks(x, len(counts))
    groups = groups_of(counts, BLOCK)
    whole, width = _padded(x, groups), x.shape[1]
    for group in groups:
        of_group = rows[group.whole], lines_of(of_rows, group, width)
        of_its_columns = part_of(columns, group, width), of_columns[blocks_of(group)]
        _cast_blocks(whole[group.whole], *of_group, *of_its_columns, False, format_name, power_of_two)
    return rows, of_rows, columns, of_columns


@fake("mplug_te::cast_group_blocks")
def _(x: Tensor, counts: Tensor, format_name: str, power_of_two: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _empty_blocks(x, len(counts))


def _empty_blocks(x: Tensor, groups: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    i, q = x.shape[1], room(x.shape[0], groups, BLOCK)
    rows, columns = x.new_empty((q, i), dtype=torch.uint8), x.new_empty(q * i, dtype=torch.uint8)
    of_rows = x.new_empty(q * (i // BLOCK), dtype=torch.float32)
    return rows, of_rows, columns, x.new_empty((q // BLOCK, i), dtype=torch.float32)


def lines_of(of_rows: Tensor, group: Group, width: int) -> Tensor:
    """The inverses of the rows of a group [I / 128, P]."""
    lines = width // BLOCK
    start = group.begin * lines
    return of_rows[start : start + group.padded * lines].view(lines, group.padded)


def blocks_of(group: Group) -> slice:
    """The lines of inverses of the columns of a group."""
    return slice(group.begin // BLOCK, (group.begin + group.padded) // BLOCK)


def _cast_blocks(
    x: Tensor,
    rows: Tensor,
    of_rows: Tensor,
    columns: Tensor,
    of_columns: Tensor,
    square: bool,
    format_name: str,
    power_of_two: bool,
) -> None:
    te, number = library().te, number_of(getattr(torch, format_name))
    named: dict[str, Any] = {"rowwise": True, "columnwise": True, "force_pow_2_scales": power_of_two}
    quantizer = te.Float8BlockQuantizer(number, block_scaling_dim=2 if square else 1, **named)
    into = te.Float8BlockwiseQTensorStorage(rows, of_rows, columns, of_columns, number, None, square)
    library().tex.quantize(x, quantizer, into, None)


@operator("mplug_te::cast_expert_blocks")
def cast_expert_blocks(weight: Tensor, format_name: str, power_of_two: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """weight [e, O, I] -> rows [e, O, I] with inverses [e, O / 128, 4 ceil(I / 512)], columns [e, I, O] with theirs."""
    found = _empty_expert_blocks(weight)
    for number, matrix in enumerate(weight.contiguous()):
        _cast_blocks(matrix, *(one[number] for one in found), True, format_name, power_of_two)
    return found


@fake("mplug_te::cast_expert_blocks")
def _(weight: Tensor, format_name: str, power_of_two: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _empty_expert_blocks(weight)


def _empty_expert_blocks(weight: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    e, o, i = weight.shape
    rows, columns = weight.new_empty((e, o, i), dtype=torch.uint8), weight.new_empty((e, i, o), dtype=torch.uint8)
    of_rows = weight.new_empty((e, o // BLOCK, padded(i // BLOCK, 4)), dtype=torch.float32)
    return rows, of_rows, columns, weight.new_empty((e, i // BLOCK, padded(o // BLOCK, 4)), dtype=torch.float32)
