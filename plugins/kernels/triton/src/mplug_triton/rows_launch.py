"""Launches the kernels that move rows. N tokens, k choices of a token, M = N k rows, D width, E experts."""

from typing import Any

import torch
import triton
from torch import Tensor

from mplug_triton.norm_launch import shape_of
from mplug_triton.rows_kernels import triton_gather_rows, triton_place_rows, triton_rank_rows, triton_spread_rows

CHOICES = 128
"""Choices of a program that ranks; it compares each of them with each other."""


def place(chosen: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """chosen [N, k] int64 -> (order [M], back [M], int64; ends [E + 1] int64: the rows up to the end of each expert).

    The last "expert" are the dropped choices. The order within an expert is that of the choices.
    """
    flat = chosen.contiguous().flatten()
    blocks = max(1, triton.cdiv(len(flat), CHOICES))
    ranks = flat.new_empty(len(flat), dtype=torch.int32)
    counts = flat.new_zeros(num_experts + 1, blocks, dtype=torch.int32)
    order, back = torch.empty_like(flat), torch.empty_like(flat)
    grid, sizes = (blocks,), (len(flat), blocks)
    with torch.cuda.device_of(flat):
        if len(flat):
            triton_rank_rows[grid](flat, ranks, counts, *sizes, CHOICES=CHOICES, num_warps=8)
        ends = counts.flatten().cumsum(0, dtype=torch.int64)
        if len(flat):
            triton_place_rows[grid](flat, ranks, ends, counts, order, back, *sizes, CHOICES=CHOICES, num_warps=4)
    return order, back, ends.view(num_experts + 1, blocks)[:, -1]


def spread(
    x: Tensor,
    back: Tensor,
    total: Tensor,
    out: Tensor,
    gates: Tensor | None,
    rows: Tensor | None,
    products: Tensor | None,
) -> None:
    """Write x [N, D] to its places in `out` [M, D]; with gates [N, k] and rows [M, D] also products [N, k] in fp32."""
    _move(triton_spread_rows, (x, back, total, gates, rows, out, products), x, back, gates)


def gather(rows: Tensor, back: Tensor, total: Tensor, y: Tensor, gates: Tensor | None) -> None:
    """Write y [N, D]: the sums of each token's rows of [M, D], with gates [N, k] weighted by them."""
    _move(triton_gather_rows, (rows, back, total, gates, y), y, back, gates)


def _move(
    kernel: Any, tensors: tuple[Tensor | None, ...], of_tokens: Tensor, back: Tensor, gates: Tensor | None
) -> None:
    """Launch a kernel whose programs have some tokens each; `of_tokens` [N, D] is what it reads or writes for these."""
    number, width = of_tokens.shape
    if not number:
        return
    padded, tile, num_warps = shape_of(width)
    with torch.cuda.device_of(of_tokens):
        kernel[(triton.cdiv(number, tile),)](
            *tensors,
            number,
            D=width,
            CHOICES=back.shape[1],
            WIDTH=padded,
            ROWS=tile,
            WEIGH=gates is not None,
            num_warps=num_warps,
        )
