"""Launches the kernels of norms. N rows, D row width."""

from functools import cache

import torch
import triton
from torch import Tensor

from mplug_triton.norm_kernels import triton_norm, triton_norm_add_shares, triton_norm_backward

TILE = 2048
"""Elements of a tile, unless a row has more; 8 per thread."""
PROGRAMS = 3
"""Programs of the backward kernel per multiprocessor; each writes a share of the weights' gradients."""
AHEAD = 72 << 10
"""Bytes of shared memory for a backward program's prefetch: a third of that of a Hopper multiprocessor."""


def shape_of(width: int) -> tuple[int, int, int]:
    """(WIDTH, ROWS, number of warps) for rows of a given width."""
    padded = triton.next_power_of_2(width)
    rows = max(1, TILE // padded)
    return padded, rows, min(16, max(1, rows * padded // 256))


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def forward(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    y: Tensor,
    summed: Tensor,
    means: Tensor,
    scales: Tensor,
) -> None:
    """Write y [..., D] and scales [N]; also s [..., D] if there is a residual, and means [N] unless they are empty."""
    if not len(scales):
        return
    width, rows, num_warps = shape_of(x.shape[-1])
    with torch.cuda.device_of(x):
        triton_norm[(triton.cdiv(len(scales), rows),)](
            x,
            residual,
            weight.contiguous(),
            None if bias is None else bias.contiguous(),
            summed,
            y,
            means,
            scales,
            len(scales),
            eps,
            D=x.shape[-1],
            WIDTH=width,
            ROWS=rows,
            CENTRED=len(means) > 0,
            RESIDUAL=residual is not None,
            BIAS=bias is not None,
            num_warps=num_warps,
        )


def backward(
    grad_y: Tensor,
    grad_summed: Tensor,
    summed: Tensor,
    weight: Tensor,
    means: Tensor,
    scales: Tensor,
    grad_s: Tensor,
    grads: Tensor,
) -> None:
    """Write grad_s [..., D], and to `grads` [1 or 2, D] the gradients of weight and, if it has two rows, bias."""
    if not len(scales):
        grads.zero_()
        return
    (parts, d), (width, rows, num_warps) = grads.shape, shape_of(summed.shape[-1])
    programs = min(triton.cdiv(len(scales), rows), PROGRAMS * _multiprocessors(summed.device))
    shares = scales.new_empty(parts, programs, d)
    with torch.cuda.device_of(summed):
        triton_norm_backward[(programs,)](
            grad_y,
            grad_summed,
            summed,
            weight.contiguous(),
            means,
            scales,
            grad_s,
            shares[0],
            shares[-1],
            len(scales),
            D=d,
            WIDTH=width,
            ROWS=rows,
            CENTRED=len(means) > 0,
            BIAS=parts == 2,
            STAGES=max(1, min(3, AHEAD // (3 * rows * width * summed.element_size()))),
            num_warps=num_warps,
        )
        triton_norm_add_shares[(triton.cdiv(d, 32), parts)](shares, grads, programs, D=d, WIDTH=32, SHARES=128)
