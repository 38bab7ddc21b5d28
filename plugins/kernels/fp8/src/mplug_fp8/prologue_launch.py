"""Launches the kernels of norms and activations. N rows, I columns, P padded rows; results are written."""

from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor

from mplug_fp8.prologue_emulation import Statistics
from mplug_fp8.prologue_kernels import (
    fp8_activated,
    fp8_activation_gradient,
    fp8_norm_gradient,
    fp8_normed,
    fp8_normed_again,
)

EXACT = {"enable_fp_fusion": False}
TILE = {"TILE_N": 64, "TILE_I": 128, "num_warps": 8}
FLAT = {"TILE_N": 16, "TILE_I": 256, "num_warps": 4}
ROW = 2048
"""Elements of a tile of whole rows, unless a row has more; 8 per thread."""
PROGRAMS = 3
"""Programs of the backward kernel of norms per multiprocessor; each writes a share of the weights' gradients."""
AHEAD = 72 << 10
"""Bytes of shared memory for the prefetch of such a program: a third of that of a Hopper multiprocessor."""


def _of_rows(width: int) -> dict[str, int]:
    """The tile of whole rows of a width."""
    padded = triton.next_power_of_2(width)
    rows = max(1, ROW // padded)
    return {"WIDTH": padded, "ROWS": rows, "num_warps": min(16, max(1, rows * padded // 256))}


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def _grid(rows: int, columns: int, tile: dict[str, int]) -> tuple[tuple[int], int]:
    """(the grid of tiles, the number of tiles in a line)."""
    lines = triton.cdiv(columns, tile["TILE_I"])
    return (max(1, triton.cdiv(rows, tile["TILE_N"])) * lines,), lines


def _bits(numbers: Tensor) -> Tensor:
    return numbers.view(torch.uint8)


def _kept(statistic: Tensor | None, instead: Tensor) -> Tensor:
    return instead if statistic is None else statistic.view(torch.int32)


def normed(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    scale: Tensor,
    statistic: Tensor | None,
    rows: Tensor,
    inverse: Tensor,
    summed: Tensor,
    statistics: Statistics,
) -> None:
    """x and residual [N, I] -> rows [N, I], inverse [1], s [N, I] if there is a residual, the statistics of rows."""
    (n, d), tile = x.shape, _of_rows(x.shape[1])
    with torch.cuda.device_of(x):
        fp8_normed[(max(1, triton.cdiv(n, tile["ROWS"])),)](
            x.contiguous(),
            x if residual is None else residual.contiguous(),
            weight.contiguous(),
            weight if bias is None else bias.contiguous(),
            scale,
            _kept(statistic, scale),
            _bits(rows),
            inverse,
            summed,
            *statistics,
            n,
            eps,
            D=d,
            CENTRED=len(statistics.means) > 0,
            RESIDUAL=residual is not None,
            BIAS=bias is not None,
            KEEP=statistic is not None,
            **tile,
            **EXACT,
        )


def normed_again(
    summed: Tensor,
    statistics: Statistics,
    weight: Tensor,
    bias: Tensor | None,
    scale: Tensor,
    numbers: Tensor,
    columns: bool,
) -> None:
    """s [N, I] -> the numbers of `normed`: columns [I, P] or rows [N, I]."""
    (n, i), wide = summed.shape, numbers.shape[1] if columns else len(numbers)
    grid, lines = _grid(wide, i, TILE)
    with torch.cuda.device_of(summed):
        fp8_normed_again[grid](
            summed.contiguous(),
            *statistics,
            weight.contiguous(),
            weight if bias is None else bias.contiguous(),
            scale,
            _bits(numbers),
            n,
            wide,
            lines,
            I=i,
            CENTRED=len(statistics.means) > 0,
            BIAS=bias is not None,
            COLUMNS=columns,
            **TILE,
            **EXACT,
        )


def norm_gradient(
    grad_y: Tensor,
    grad_summed: Tensor,
    summed: Tensor,
    statistics: Statistics,
    weight: Tensor,
    grad_s: Tensor,
    grads: Tensor,
) -> None:
    """Write the gradient of s [N, I], and to `grads` [1 or 2, I] those of the weight and the bias."""
    (n, d), tile = summed.shape, _of_rows(summed.shape[1])
    if not n:
        grads.zero_()
        return
    programs = min(triton.cdiv(n, tile["ROWS"]), PROGRAMS * _multiprocessors(summed.device))
    shares = summed.new_empty((len(grads), programs, d), dtype=torch.float32)
    ahead = 3 * tile["ROWS"] * tile["WIDTH"] * summed.element_size()
    with torch.cuda.device_of(summed):
        fp8_norm_gradient[(programs,)](
            grad_y.contiguous(),
            grad_summed.contiguous(),
            summed.contiguous(),
            *statistics,
            weight.contiguous(),
            grad_s,
            shares[0],
            shares[-1],
            n,
            D=d,
            CENTRED=len(statistics.means) > 0,
            BIAS=len(grads) == 2,
            STAGES=max(1, min(3, AHEAD // ahead)),
            **tile,
        )
        grads.copy_(shares.sum(1))


def _of_kind(kind: str) -> dict[str, bool]:
    return {"GATED": kind == "swiglu", "TANH": kind == "gelu_tanh"}


def activated(
    x: Tensor,
    bias: Tensor | None,
    kind: str,
    scale: Tensor,
    statistic: Tensor | None,
    rows: Tensor,
    inverse: Tensor,
) -> None:
    """x [N, I] (swiglu: [N, 2I]) -> rows [N, I], inverse [1]."""
    n, i = rows.shape
    grid, lines = _grid(n, i, FLAT)
    options: dict[str, Any] = {**_of_kind(kind), **FLAT}
    with torch.cuda.device_of(x):
        fp8_activated[grid](
            x.contiguous(),
            x if bias is None else bias.contiguous(),
            scale,
            _kept(statistic, scale),
            _bits(rows),
            inverse,
            n,
            lines,
            I=i,
            BIAS=bias is not None,
            KEEP=statistic is not None,
            **options,
        )


def activation_gradient(
    grad: Tensor,
    x: Tensor,
    bias: Tensor | None,
    kind: str,
    scale: Tensor,
    grad_x: Tensor,
    grad_bias: Tensor,
    numbers: Tensor,
    columns: bool,
) -> None:
    """Write the gradient of x, that of the bias if there is one, and the numbers: columns [I, P] or rows [N, I]."""
    (n, i), wide = grad.shape, numbers.shape[1] if columns else len(numbers)
    grid, lines = _grid(wide, i, TILE)
    shares = x.new_empty((grid[0] // lines, x.shape[1]) if bias is not None else (1,), dtype=torch.float32)
    options: dict[str, Any] = {**_of_kind(kind), **TILE}
    with torch.cuda.device_of(x):
        fp8_activation_gradient[grid](
            grad.contiguous(),
            x.contiguous(),
            x if bias is None else bias.contiguous(),
            scale,
            grad_x,
            shares,
            _bits(numbers),
            n,
            wide,
            lines,
            I=i,
            BIAS=bias is not None,
            COLUMNS=columns,
            **options,
        )
        if bias is not None:
            grad_bias.copy_(shares.sum(0))
