"""The Triton kernels of norms. N rows, D row width; rows are contiguous.

A program processes a tile [ROWS, WIDTH] of whole rows in fp32. WIDTH is D rounded up to a power of two. A row is read
once; its mean and deviation are computed in registers.
"""
# ruff: noqa: N803 (compile-time constants are in capitals, as is usual in Triton)

import triton
import triton.language as tl


@triton.jit
def triton_norm(
    x,
    residual,
    weight,
    bias,
    summed,
    y,
    means,
    scales,
    num_rows,
    eps,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    CENTRED: tl.constexpr,
    RESIDUAL: tl.constexpr,
    BIAS: tl.constexpr,
):
    """y = (s - mean) * scale * weight + bias with s = x + residual; also stores s, means and scales for backward."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    i = tl.arange(0, WIDTH)[None, :]
    inside = (row < num_rows) & (i < D)
    at = row * D + i
    s = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if RESIDUAL:
        s += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
        rounded = s.to(summed.dtype.element_ty)  # the value that the block continues with and backward reads
        tl.store(summed + at, rounded, mask=inside)
        s = rounded.to(tl.float32)
    if CENTRED:
        mean = tl.sum(s, axis=1, keep_dims=True) / D
        tl.store(means + row, mean, mask=row < num_rows)
        s = tl.where(i < D, s - mean, 0.0)
    scale = tl.rsqrt(tl.sum(s * s, axis=1, keep_dims=True) / D + eps)
    tl.store(scales + row, scale, mask=row < num_rows)
    normed = s * scale * tl.load(weight + i, mask=i < D, other=0.0).to(tl.float32)
    if BIAS:
        normed += tl.load(bias + i, mask=i < D, other=0.0).to(tl.float32)
    tl.store(y + at, normed.to(y.dtype.element_ty), mask=inside)


@triton.jit
def triton_norm_backward(
    grad_y,
    grad_summed,
    summed,
    weight,
    means,
    scales,
    grad_s,
    weight_sums,
    bias_sums,
    num_rows,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    CENTRED: tl.constexpr,
    BIAS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """The gradient of s [N, D], and each program's share of the gradients of weight and bias [programs, D], in fp32.

    With n the normed s and g = grad_y * weight: grad_s = scale * (g - mean(g) - n * mean(g * n)) + grad_summed. The
    term mean(g) is omitted unless CENTRED. A program processes every num_programs-th tile, pipelined over STAGES. It
    adds up its rows at its end only: a sum in every tile would make its warps wait for one another.
    """
    i = tl.arange(0, WIDTH)[None, :]
    w = tl.load(weight + i, mask=i < D, other=0.0).to(tl.float32)
    weight_sums_of_rows = tl.zeros([ROWS, WIDTH], tl.float32)
    bias_sums_of_rows = tl.zeros([ROWS, WIDTH], tl.float32)
    for tile in tl.range(tl.program_id(0), tl.cdiv(num_rows, ROWS), tl.num_programs(0), num_stages=STAGES):
        row = (tile * ROWS + tl.arange(0, ROWS)[:, None]).to(tl.int64)
        inside = (row < num_rows) & (i < D)
        at = row * D + i
        upstream = tl.load(grad_y + at, mask=inside, other=0.0).to(tl.float32)
        n = tl.load(summed + at, mask=inside, other=0.0).to(tl.float32)
        beside = tl.load(grad_summed + at, mask=inside, other=0.0).to(tl.float32)
        scale = tl.load(scales + row, mask=row < num_rows, other=0.0)
        if CENTRED:
            n -= tl.load(means + row, mask=row < num_rows, other=0.0)
        n = tl.where(inside, n * scale, 0.0)
        weight_sums_of_rows += upstream * n
        if BIAS:
            bias_sums_of_rows += upstream
        g = upstream * w
        grad = g - n * (tl.sum(g * n, axis=1, keep_dims=True) / D)
        if CENTRED:
            grad -= tl.sum(g, axis=1, keep_dims=True) / D
        tl.store(grad_s + at, (grad * scale + beside).to(grad_s.dtype.element_ty), mask=inside)
    share = tl.program_id(0) * D + i
    tl.store(weight_sums + share, tl.sum(weight_sums_of_rows, axis=0, keep_dims=True), mask=i < D)
    if BIAS:
        tl.store(bias_sums + share, tl.sum(bias_sums_of_rows, axis=0, keep_dims=True), mask=i < D)


@triton.jit
def triton_norm_add_shares(shares, total, num_shares, D: tl.constexpr, WIDTH: tl.constexpr, SHARES: tl.constexpr):
    """total [parts, D] = the sum of shares [parts, num_shares, D] in fp32, in a fixed order."""
    part = tl.program_id(1)
    i = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)[None, :]
    sums = tl.zeros([SHARES, WIDTH], tl.float32)
    for first in range(0, num_shares, SHARES):
        share = first + tl.arange(0, SHARES)[:, None]
        at = (part * num_shares + share) * D + i
        sums += tl.load(shares + at, mask=(share < num_shares) & (i < D), other=0.0)
    whole = tl.sum(sums, axis=0, keep_dims=True)
    tl.store(total + part * D + i, whole.to(total.dtype.element_ty), mask=i < D)
