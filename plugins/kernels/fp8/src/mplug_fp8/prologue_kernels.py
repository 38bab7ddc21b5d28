"""The Triton kernels of norms and activations that give fp8 numbers; `prologue_emulation` defines their results.

N rows, I columns, P padded rows. They are compiled without fused multiply-adds (`prologue_launch`). So a norm has the
bits of the definition, given the statistics of its rows.
"""
# ruff: noqa: N803 (compile-time constants are in capitals, as is usual in Triton)

import triton
import triton.language as tl

from mplug_fp8.kernels import _bits, _numbers, _tile


@triton.jit
def _store_numbers(value, scale, statistic, at, inside, KEEP: tl.constexpr):
    """Write value * scale in E4M3; KEEP raises `statistic` to the bits of the largest absolute value."""
    if KEEP:
        bits = tl.where(inside, _bits(value), 0)
        largest = tl.max(tl.max(bits, axis=1), axis=0)
        tl.atomic_max(statistic, largest, mask=largest > tl.load(statistic, volatile=True), sem="relaxed")
    value += value * 0.0  # infinity becomes NaN
    tl.store(at, _numbers(value, tl.load(scale), False), mask=inside)


@triton.jit
def _store_again(value, scale, numbers, row, column, inside, padded_rows, I: tl.constexpr, COLUMNS: tl.constexpr):  # noqa: E741
    """Write value * scale of a tile in E4M3 to numbers [N, I], or to [I, P] with zeros outside."""
    value += value * 0.0
    found = tl.where(inside, _numbers(value, tl.load(scale), False), 0)
    if COLUMNS:
        at = numbers + column[:, None].to(tl.int64) * padded_rows + row[None, :]
        tl.store(at, tl.trans(found), mask=(column[:, None] < I) & (row[None, :] < padded_rows))
    else:
        tl.store(numbers + row[:, None] * I + column[None, :], found, mask=inside)


@triton.jit
def fp8_normed(
    x,
    residual,
    weight,
    bias,
    scale,
    statistic,
    rows,
    inverse,
    summed,
    means,
    deviations,
    num_rows,
    eps,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    CENTRED: tl.constexpr,
    RESIDUAL: tl.constexpr,
    BIAS: tl.constexpr,
    KEEP: tl.constexpr,
):
    """The norm of s = x + residual in fp8, from one reading of whole rows; stores s and the statistics of its rows."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    i = tl.arange(0, WIDTH)[None, :]
    inside = (row < num_rows) & (i < D)
    at = row * D + i
    s = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if RESIDUAL:
        s += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
        rounded = s.to(summed.dtype.element_ty)
        tl.store(summed + at, rounded, mask=inside)
        s = rounded.to(tl.float32)
    if CENTRED:
        mean = tl.sum(s, axis=1, keep_dims=True) / D
        tl.store(means + row, mean, mask=row < num_rows)
        s = tl.where(i < D, s - mean, 0.0)
    deviation = tl.rsqrt(tl.sum(s * s, axis=1, keep_dims=True) / D + eps)
    tl.store(deviations + row, deviation, mask=row < num_rows)
    value = s * deviation * tl.load(weight + i, mask=i < D, other=0.0).to(tl.float32)
    if BIAS:
        value += tl.load(bias + i, mask=i < D, other=0.0).to(tl.float32)
    _store_numbers(value, scale, statistic, rows + at, inside, KEEP)
    if tl.program_id(0) == 0:
        tl.store(inverse, tl.div_rn(1.0, tl.load(scale)))


@triton.jit
def fp8_normed_again(
    summed,
    means,
    deviations,
    weight,
    bias,
    scale,
    numbers,
    num_rows,
    padded_rows,
    num_lines,
    I: tl.constexpr,  # noqa: E741
    CENTRED: tl.constexpr,
    BIAS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_I: tl.constexpr,
):
    """The numbers of `fp8_normed` from s [N, I] and its statistics: rows [N, I] or columns [I, P]."""
    row, column = _tile(num_lines, TILE_N, TILE_I)
    r, c = row[:, None], column[None, :]
    inside = (r < num_rows) & (c < I)
    s = tl.load(summed + r * I + c, mask=inside, other=0.0).to(tl.float32)
    if CENTRED:
        s -= tl.load(means + row, mask=row < num_rows, other=0.0)[:, None]
    deviation = tl.load(deviations + row, mask=row < num_rows, other=0.0)[:, None]
    value = s * deviation * tl.load(weight + column, mask=column < I, other=0.0).to(tl.float32)[None, :]
    if BIAS:
        value += tl.load(bias + column, mask=column < I, other=0.0).to(tl.float32)[None, :]
    _store_again(value, scale, numbers, row, column, inside, padded_rows, I, COLUMNS)


@triton.jit
def fp8_norm_gradient(
    grad_y,
    grad_summed,
    summed,
    means,
    deviations,
    weight,
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
    """The gradient of s [N, D], and each program's share of those of weight and bias [programs, D], in fp32."""
    i = tl.arange(0, WIDTH)[None, :]
    w = tl.load(weight + i, mask=i < D, other=0.0).to(tl.float32)
    weight_sum = tl.zeros([1, WIDTH], tl.float32)
    bias_sum = tl.zeros([1, WIDTH], tl.float32)
    for tile in tl.range(tl.program_id(0), tl.cdiv(num_rows, ROWS), tl.num_programs(0), num_stages=STAGES):
        row = (tile * ROWS + tl.arange(0, ROWS)[:, None]).to(tl.int64)
        inside = (row < num_rows) & (i < D)
        at = row * D + i
        upstream = tl.load(grad_y + at, mask=inside, other=0.0).to(tl.float32)
        n = tl.load(summed + at, mask=inside, other=0.0).to(tl.float32)
        beside = tl.load(grad_summed + at, mask=inside, other=0.0).to(tl.float32)
        deviation = tl.load(deviations + row, mask=row < num_rows, other=0.0)
        if CENTRED:
            n -= tl.load(means + row, mask=row < num_rows, other=0.0)
        n = tl.where(inside, n * deviation, 0.0)
        weight_sum += tl.sum(upstream * n, axis=0, keep_dims=True)
        if BIAS:
            bias_sum += tl.sum(upstream, axis=0, keep_dims=True)
        g = upstream * w
        grad = g - n * (tl.sum(g * n, axis=1, keep_dims=True) / D)
        if CENTRED:
            grad -= tl.sum(g, axis=1, keep_dims=True) / D
        tl.store(grad_s + at, (grad * deviation + beside).to(grad_s.dtype.element_ty), mask=inside)
    share = tl.program_id(0) * D + i
    tl.store(weight_sums + share, weight_sum, mask=i < D)
    if BIAS:
        tl.store(bias_sums + share, bias_sum, mask=i < D)


@triton.jit
def _read(x, bias, at, column, inside, BIAS: tl.constexpr):
    """x + bias, rounded to the type of x, in fp32."""
    value = tl.load(x + at, mask=inside, other=0.0)
    if BIAS:
        added = tl.load(bias + column, mask=column >= 0, other=0.0).to(value.dtype).to(tl.float32)
        value = (value.to(tl.float32) + added[None, :]).to(value.dtype)
    return value.to(tl.float32)


@triton.jit
def _gelu(x, TANH: tl.constexpr):
    """(GELU, its slope)."""
    if TANH:
        squared = x * x
        twice = 1.5957691216057308 * x * (1.0 + 0.044715 * squared)  # 2 sqrt(2 / pi)
        below = 1.0 / (1.0 + tl.exp(-twice))
        slope = below + x * below * (1.0 - below) * 1.5957691216057308 * (1.0 + 0.134145 * squared)
        return x * below, slope
    below = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
    return x * below, below + x * tl.exp(-0.5 * x * x) * 0.3989422804014327


@triton.jit
def fp8_activated(
    x,
    bias,
    scale,
    statistic,
    rows,
    inverse,
    num_rows,
    num_lines,
    I: tl.constexpr,  # noqa: E741
    GATED: tl.constexpr,
    TANH: tl.constexpr,
    BIAS: tl.constexpr,
    KEEP: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_I: tl.constexpr,
):
    """The activation of x [N, I] in fp8 [N, I]; GATED: SwiGLU of x [N, 2I]."""
    row, column = _tile(num_lines, TILE_N, TILE_I)
    r, c = row[:, None], column[None, :]
    inside = (r < num_rows) & (c < I)
    wide: tl.constexpr = 2 * I if GATED else I
    own = tl.where(column < I, column, -1)
    first = _read(x, bias, r * wide + c, own, inside, BIAS)
    if GATED:
        second = _read(x + I, bias + I, r * wide + c, own, inside, BIAS)
        value = first / (1.0 + tl.exp(-first)) * second
    else:
        value, _ = _gelu(first, TANH)
    _store_numbers(value, scale, statistic, rows + r * I + c, inside, KEEP)
    if tl.program_id(0) == 0:
        tl.store(inverse, tl.div_rn(1.0, tl.load(scale)))


@triton.jit
def fp8_activation_gradient(
    grad,
    x,
    bias,
    scale,
    grad_x,
    bias_sums,
    numbers,
    num_rows,
    padded_rows,
    num_lines,
    I: tl.constexpr,  # noqa: E741
    GATED: tl.constexpr,
    TANH: tl.constexpr,
    BIAS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_I: tl.constexpr,
):
    """The gradient of x, each line of tiles' share of the bias's, and the numbers of `fp8_activated`."""
    row, column = _tile(num_lines, TILE_N, TILE_I)
    r, c = row[:, None], column[None, :]
    inside = (r < num_rows) & (c < I)
    wide: tl.constexpr = 2 * I if GATED else I
    own = tl.where(column < I, column, -1)
    at = r * wide + c
    share = bias_sums + (tl.program_id(0) // num_lines).to(tl.int64) * wide + column
    upstream = tl.load(grad + r * I + c, mask=inside, other=0.0).to(tl.float32)
    first = _read(x, bias, at, own, inside, BIAS)
    if GATED:
        second = _read(x + I, bias + I, at, own, inside, BIAS)
        below = 1.0 / (1.0 + tl.exp(-first))
        silu = first * below
        value = silu * second
        of_second = tl.where(inside, upstream * silu, 0.0)
        tl.store(grad_x + at + I, of_second.to(grad_x.dtype.element_ty), mask=inside)
        if BIAS:
            tl.store(share + I, tl.sum(of_second, axis=0), mask=column < I)
        of_first = upstream * second * (below + silu * (1.0 - below))
    else:
        value, slope = _gelu(first, TANH)
        of_first = upstream * slope
    of_first = tl.where(inside, of_first, 0.0)
    tl.store(grad_x + at, of_first.to(grad_x.dtype.element_ty), mask=inside)
    if BIAS:
        tl.store(share, tl.sum(of_first, axis=0), mask=column < I)
    _store_again(value, scale, numbers, row, column, inside, padded_rows, I, COLUMNS)
