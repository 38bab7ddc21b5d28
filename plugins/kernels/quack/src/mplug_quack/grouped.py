"""The supplier of `Experts.product`: QuACK's products of groups of rows, in bf16.

Rows are ordered by group. M rows, e groups, I input, O output. The kernels read where groups begin from the device, so
the CPU waits for nothing. The weights' gradients are summed in fp32, and go into the sink without a copy.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from mplug_nn import GroupedProduct, Sink, fake, operator
from mplug_quack.rows import aligned_rows


class Tile(NamedTuple):
    """The part of a product that a block of threads computes at once, and how many neighbours share operands."""

    rows: int
    columns: int
    pingpong: bool
    cluster_rows: int
    cluster_columns: int


SMALL, LARGE = Tile(128, 192, True, 2, 1), Tile(128, 256, False, 2, 1)
MANY = 2048
"""Rows of a group, on average, from which LARGE is the faster tile on an H200 (`benchmarks/grouped.py --tiles`)."""


def tile_for(num_rows: int, groups: int) -> Tile:
    """The tile of products of so many rows in so many groups."""
    return LARGE if num_rows >= MANY * groups else SMALL


@dataclass(frozen=True)
class QuackGroups(GroupedProduct):
    """The three grouped products. Forward saves the rows."""

    def multiply(self, rows: Tensor, values: Tensor, ends: Tensor, transposed: bool) -> Tensor:
        """By QuACK."""
        return multiply_groups(rows, values, ends, transposed)

    def add(self, sink: Sink, grad_y: Tensor, rows: Tensor, ends: Tensor) -> None:
        """By QuACK, directly into the sink."""
        add_multiplied_groups(*sink, grad_y, rows, ends)


@operator("mplug_quack::multiply_groups")
def multiply_groups(rows: Tensor, weight: Tensor, ends: Tensor, transposed: bool) -> Tensor:
    """rows [M, I] times the matrix of each row's group: weight [e, O, I] if `transposed`, else [e, I, O] -> [M, O].

    `ends` [e] int32: the index after the last row of each group. Rows after the last group are not written.
    """
    weight = weight.contiguous()
    y = rows.new_empty(rows.shape[0], weight.shape[1] if transposed else weight.shape[2])
    if y.numel():
        matrices = weight if transposed else weight.mT
        _multiply(ends, aligned_rows(rows), matrices, y, cu_seqlens_m=bounds_of(ends))
    return y


@fake("mplug_quack::multiply_groups")
def _(rows: Tensor, weight: Tensor, ends: Tensor, transposed: bool) -> Tensor:
    return rows.new_empty(rows.shape[0], weight.shape[1] if transposed else weight.shape[2])


@operator("mplug_quack::add_multiplied_groups", mutates_args=("total", "stale"))
def add_multiplied_groups(total: Tensor, stale: Tensor, a: Tensor, b: Tensor, ends: Tensor) -> None:
    """total [e, O, I] += aᵀ b of each group, with a [M, O] and b [M, I]; the products overwrite a total that is stale.

    The kernel writes or adds in the dtype of `total`. A group without rows has the product 0.
    """
    if not a.shape[0]:
        if stale:
            total.zero_()
    elif total.is_contiguous() and total.data_ptr() % 16 == 0:
        a, b = aligned_rows(a), aligned_rows(b)
        _multiply(ends, a.t(), b.t(), total, cu_seqlens_k=bounds_of(ends), add_to_output=not stale)
    else:
        products = torch.empty(total.shape, dtype=total.dtype, device=total.device)
        add_multiplied_groups(products, torch.ones((), dtype=torch.bool), a, b, ends)
        total.copy_(products) if stale else total.add_(products)
    stale.fill_(False)


def bounds_of(ends: Tensor) -> Tensor:
    """ends [e] -> where each group begins, and where the last one ends [e + 1], int32."""
    return torch.nn.functional.pad(ends.to(torch.int32), (1, 0))


def _multiply(ends: Tensor, a: Tensor, b: Tensor, y: Tensor, **groups: Any) -> None:
    """y = a bᵀ of each group by QuACK; a [m, k], b [n, k] or [e, n, k], each contiguous along one of the two."""
    from quack.gemm import gemm

    tile = tile_for(a.shape[1 if "cu_seqlens_k" in groups else 0], len(ends))
    shape = tile.rows, tile.columns, tile.cluster_rows, tile.cluster_columns
    gemm(a, b, y, None, None, *shape, pingpong=tile.pingpong, **groups)


@register_flop_formula(torch.ops.mplug_quack.multiply_groups)
def _flops(rows: tuple[int, ...], weight: tuple[int, ...], *_: Any, **__: Any) -> int:
    """Two FLOPs per multiply-add of every row."""
    return 2 * rows[0] * weight[1] * weight[2]


@register_flop_formula(torch.ops.mplug_quack.add_multiplied_groups)
def _flops_of_sum(total: tuple[int, ...], stale: Any, a: tuple[int, ...], *_: Any, **__: Any) -> int:
    """Two FLOPs per multiply-add of every row, in the weights' gradients."""
    return 2 * a[0] * total[1] * total[2]
