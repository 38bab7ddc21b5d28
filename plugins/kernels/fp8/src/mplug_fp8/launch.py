"""Launches the kernels: the same functions as `emulation`'s, on a GPU. N rows, I columns, P padded rows, O outputs."""

import torch
import triton
from torch import Tensor

from mplug_fp8.emulation import BLOCK, E4M3, E5M2, GROUP, columns_of_groups, padded
from mplug_fp8.kernels import (
    fp8_add_groups,
    fp8_cast,
    fp8_cast_blocks,
    fp8_cast_groups,
    fp8_cast_lines,
    fp8_cast_rowwise,
    fp8_largest,
    fp8_largest_of_groups,
    fp8_largest_rowwise,
    fp8_transpose,
)

CAST = {"TILE_N": 64, "TILE_I": 128, "num_warps": 4}
TRANSPOSE = {"TILE_N": 128, "TILE_I": 128, "num_warps": 8}
ROWWISE = {"TILE_N": 64, "TILE_I": 64, "num_warps": 2}
GROUPED = {"TILE_N": GROUP, "TILE_I": 128, "num_warps": 4}
BLOCKWISE = {"TILE": BLOCK, "num_warps": 4}
"""The tiles that were fastest on an H200 (`benchmarks/fp8.py`)."""
PARTS = 1024
"""Maximum number of partial maxima: every program that casts reads all of them."""
SUM = 4096
"""Numbers that a program adds."""
CHUNK = 8192
"""Numbers that a program reads at once for a maximum."""


def _tiles(rows: int, columns: int, tile: dict[str, int]) -> tuple[tuple[int], int]:
    """(the grid of tiles, the number of tiles in a line of them)."""
    lines = triton.cdiv(columns, tile["TILE_I"])
    return (max(1, triton.cdiv(rows, tile["TILE_N"])) * lines,), lines


def largest_of(x: Tensor) -> Tensor:
    """x -> the largest absolute values of parts of it, at most PARTS."""
    parts = max(1, min(PARTS, triton.cdiv(x.numel(), CHUNK)))
    partial = torch.empty(parts, dtype=torch.int32, device=x.device)
    with torch.cuda.device_of(x):
        fp8_largest[(parts,)](x, partial, x.numel(), BLOCK=CHUNK, num_warps=8)
    return partial.view(torch.float32)


def cast(
    x: Tensor,
    source: Tensor,
    statistic: Tensor | None,
    dtype: torch.dtype,
    power_of_two: bool,
    current: bool,
    rows: Tensor | None,
    columns: Tensor | None,
) -> Tensor:
    """Write rows [N, I] and columns [I, P] of x [N, I] if they are wanted; return the inverse [1].

    If `current`, `source` are the largest absolute values of parts of x. Else it is the scale, and `statistic` is
    raised to the largest absolute value.
    """
    n, i = x.shape
    inverse = torch.empty(1, dtype=torch.float32, device=x.device)
    wide = n if columns is None else columns.shape[1]
    grid, lines = _tiles(wide, i, CAST)
    with torch.cuda.device_of(x):
        fp8_cast[grid](
            x,
            x if rows is None else rows.view(torch.uint8),
            x if columns is None else columns.view(torch.uint8),
            source.view(torch.int32) if current else source,
            inverse,
            x if statistic is None else statistic.view(torch.int32),
            n,
            wide,
            source.numel(),
            lines,
            I=i,
            E5M2=dtype == E5M2,
            POWER=power_of_two,
            PARTS=triton.next_power_of_2(source.numel()) if current else 0,
            ROWS=rows is not None,
            COLUMNS=columns is not None,
            KEEP=statistic is not None,
            **CAST,
        )
    return inverse


def transposed(rows: Tensor, columns: Tensor) -> None:
    """Write columns [I, P] from fp8 numbers [N, I]."""
    (n, i), wide = rows.shape, columns.shape[1]
    grid, lines = _tiles(wide, i, TRANSPOSE)
    with torch.cuda.device_of(rows):
        fp8_transpose[grid](
            rows.view(torch.uint8),
            columns.view(torch.uint8),
            n,
            wide,
            lines,
            I=i,
            **TRANSPOSE,
        )


def cast_rowwise(x: Tensor, power_of_two: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x [W, N, I] -> rows [W, N, I] with inverses [W, N], columns [W, I, P] with inverses [W, I]."""
    w, n, i = x.shape
    wide = padded(n)
    (tiles,), lines = _tiles(wide, i, ROWWISE)
    bits = torch.zeros(w * (n + i), dtype=torch.int32, device=x.device)
    inverses = torch.empty(w * (n + i), dtype=torch.float32, device=x.device)
    (row_bits, column_bits), (row_inverses, column_inverses) = (t.split((w * n, w * i)) for t in (bits, inverses))
    rows, columns = x.new_empty((w, n, i), dtype=E4M3), x.new_empty((w, i, wide), dtype=E4M3)
    grid, shape = (tiles, w), {"I": i, **ROWWISE}
    with torch.cuda.device_of(x):
        fp8_largest_rowwise[grid](x, row_bits, column_bits, n, lines, **shape)
        fp8_cast_rowwise[grid](
            x,
            rows.view(torch.uint8),
            columns.view(torch.uint8),
            row_bits,
            column_bits,
            row_inverses,
            column_inverses,
            n,
            wide,
            lines,
            POWER=power_of_two,
            **shape,
        )
    return rows, row_inverses.view(w, n).clone(), columns, column_inverses.view(w, i).clone()


def cast_lines(x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x [N, I] -> rows [P, I] with inverses [I / 128, P], columns [I, P] with inverses [P / 128, I]."""
    n, i = x.shape
    wide, lines = padded(n, BLOCK), i // BLOCK
    rows, columns = x.new_empty((wide, i), dtype=E4M3), x.new_empty((i, wide), dtype=E4M3)
    row_inverses = x.new_empty((lines, wide), dtype=torch.float32)
    column_inverses = x.new_empty((wide // BLOCK, i), dtype=torch.float32)
    with torch.cuda.device_of(x):
        fp8_cast_lines[(wide // BLOCK * lines,)](
            x,
            rows.view(torch.uint8),
            columns.view(torch.uint8),
            row_inverses,
            column_inverses,
            n,
            wide,
            lines,
            I=i,
            **BLOCKWISE,
        )
    return rows, row_inverses, columns, column_inverses


def cast_blocks(weight: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """weight [O, I] -> rows [O, I], inverses [O / 128, 4 ceil(I / 512)], columns [I, O] with theirs."""
    o, i = weight.shape
    lines, blocks = i // BLOCK, o // BLOCK
    rows, columns = weight.new_empty((o, i), dtype=E4M3), weight.new_empty((i, o), dtype=E4M3)
    row_inverses = weight.new_zeros((blocks, padded(lines, 4)), dtype=torch.float32)
    column_inverses = weight.new_zeros((lines, padded(blocks, 4)), dtype=torch.float32)
    with torch.cuda.device_of(weight):
        fp8_cast_blocks[(blocks * lines,)](
            weight,
            rows.view(torch.uint8),
            columns.view(torch.uint8),
            row_inverses,
            column_inverses,
            o,
            lines,
            row_inverses.shape[1],
            column_inverses.shape[1],
            I=i,
            **BLOCKWISE,
        )
    return rows, row_inverses, columns, column_inverses


def cast_grouped(x: Tensor, ends: Tensor, power_of_two: bool) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """x [M, I], ends [e] -> rows [M, I] with inverses [M], columns [I, Q] with inverses [e, I], ends of columns [e].

    The CPU does not wait for the device. Rows after the last group are arbitrary, and so are the columns' inverses of
    an empty group.
    """
    (m, i), e = x.shape, len(ends)
    wide = columns_of_groups(m, e)
    row_bits = torch.zeros(m, dtype=torch.int32, device=x.device)
    column_bits = torch.zeros(e * i, dtype=torch.int32, device=x.device)
    rows, columns = x.new_empty((m, i), dtype=E4M3), x.new_empty((i, wide), dtype=E4M3)
    row_inverses = x.new_empty(m, dtype=torch.float32)
    column_inverses = x.new_ones((e, i), dtype=torch.float32)
    column_ends = torch.empty_like(ends)
    shape = {"I": i, "GROUPS": triton.next_power_of_2(e), **GROUPED}
    grid = (wide // GROUP, triton.cdiv(i, GROUPED["TILE_I"]))
    with torch.cuda.device_of(x):
        fp8_largest_of_groups[grid](x, ends, row_bits, column_bits, e, **shape)
        fp8_cast_groups[grid](
            x,
            ends,
            rows.view(torch.uint8),
            columns.view(torch.uint8),
            row_bits,
            column_bits,
            row_inverses,
            column_inverses,
            column_ends,
            e,
            wide,
            POWER=power_of_two,
            **shape,
        )
    return rows, row_inverses, columns, column_inverses, column_ends


def add_groups(total: Tensor, products: Tensor, ends: Tensor, stale: bool) -> None:
    """total [e, O, I] += products [e, O, I], or = them if stale; a group that has no rows by `ends` [e] adds 0."""
    size = products[0].numel()
    with torch.cuda.device_of(total):
        grid = (triton.cdiv(size, SUM), len(ends))
        fp8_add_groups[grid](total, products, ends, size, STALE=stale, BLOCK=SUM, num_warps=4)
