"""The Triton kernels of packed QKV projections.

B batch, S sequence, H query heads, G KV heads, K head dim. A row is one head of one token.

A program processes up to ROWS rows of a token, all queries, all keys or all values. RoPE pairs the two halves of a row.
They are two tiles [ROWS, HALF], x and y, in fp32; HALF is K/2 rounded up to a power of two. Neighbouring programs
process rows of the same token, so its cosines and sines are in cache.
"""
# ruff: noqa: N803 (compile-time constants are in capitals, as is usual in Triton)

import triton
import triton.language as tl


@triton.jit
def triton_prepare_qkv(
    heads,
    q,
    k,
    turns,
    q_weight,
    k_weight,
    seq_length,
    num_heads,
    num_kv_heads,
    heads_b,
    heads_s,
    heads_n,
    to_sines,
    turns_b,
    eps,
    K: tl.constexpr,
    HALF: tl.constexpr,
    ROWS: tl.constexpr,
    Q_BLOCKS: tl.constexpr,
    KV_BLOCKS: tl.constexpr,
    NORM: tl.constexpr,
    ROTATE: tl.constexpr,
):
    """Write q [B, S, H, K] and k [B, S, G, K], contiguous, from packed heads [B, S, H + 2G, K]."""
    sample, position = tl.program_id(1).to(tl.int64), (tl.program_id(0) // (Q_BLOCKS + KV_BLOCKS)).to(tl.int64)
    block, token = tl.program_id(0) % (Q_BLOCKS + KV_BLOCKS), sample * seq_length + position
    source = heads + sample * heads_b + position * heads_s
    if ROTATE:
        turns += sample * turns_b + position * (K // 2)
    if block < Q_BLOCKS:
        target = q + token * num_heads * K
        _prepare(
            source, target, q_weight, turns, block * ROWS, num_heads, heads_n, to_sines, eps,
            K, HALF, ROWS, NORM, ROTATE,
        )  # fmt: skip
    else:
        target = k + token * num_kv_heads * K
        _prepare(
            source + num_heads * heads_n, target, k_weight, turns, (block - Q_BLOCKS) * ROWS, num_kv_heads,
            heads_n, to_sines, eps, K, HALF, ROWS, NORM, ROTATE,
        )  # fmt: skip


@triton.jit
def _prepare(
    source,
    target,
    weight,
    turns,
    first_row,
    num_rows,
    source_n,
    to_sines,
    eps,
    K: tl.constexpr,
    HALF: tl.constexpr,
    ROWS: tl.constexpr,
    NORM: tl.constexpr,
    ROTATE: tl.constexpr,
):
    """Normalise and rotate the rows of one token."""
    n = first_row + tl.arange(0, ROWS)[:, None]
    i = tl.arange(0, HALF)[None, :]
    inside = (n < num_rows) & (i < K // 2)
    x, y = _halves(source + n * source_n + i, inside, K)
    if NORM:
        scale = _inverse_rms(x, y, eps, K)
        x_weight, y_weight = _halves(weight + i, i < K // 2, K)
        x, y = x * scale * x_weight, y * scale * y_weight
    if ROTATE:
        cos, sin = _cos_sin(turns + i, to_sines, i < K // 2)
        x, y = x * cos - y * sin, y * cos + x * sin
    _write(target + n * K + i, x, y, inside, K)


@triton.jit
def triton_prepare_qkv_backward(
    grad_q,
    grad_k,
    grad_v,
    heads,
    packed,
    turns,
    q_weight,
    k_weight,
    sums,
    seq_length,
    num_heads,
    num_kv_heads,
    q_b,
    q_s,
    q_n,
    k_b,
    k_s,
    k_n,
    v_b,
    v_s,
    v_n,
    heads_b,
    heads_s,
    heads_n,
    to_sines,
    turns_b,
    eps,
    K: tl.constexpr,
    HALF: tl.constexpr,
    ROWS: tl.constexpr,
    Q_BLOCKS: tl.constexpr,
    KV_BLOCKS: tl.constexpr,
    TOKENS: tl.constexpr,
    NORM: tl.constexpr,
    ROTATE: tl.constexpr,
):
    """Write the gradient of packed heads, contiguous, and each program's share of the weights' gradients.

    A program processes rows of TOKENS tokens of a sample. `sums` is [B, groups of TOKENS tokens, Q_BLOCKS + KV_BLOCKS,
    K].
    """
    sample, group = tl.program_id(1).to(tl.int64), (tl.program_id(0) // (Q_BLOCKS + 2 * KV_BLOCKS)).to(tl.int64)
    block, first = tl.program_id(0) % (Q_BLOCKS + 2 * KV_BLOCKS), group * TOKENS
    packed_s = (num_heads + 2 * num_kv_heads) * K
    packed += sample * seq_length * packed_s
    keys = heads
    if NORM:
        heads += sample * heads_b
        keys = heads + num_heads * heads_n
        sums += ((sample * tl.cdiv(seq_length, TOKENS) + group) * (Q_BLOCKS + KV_BLOCKS) + block) * K
    if ROTATE:
        turns += sample * turns_b
    if block < Q_BLOCKS:
        _prepare_backward(
            grad_q + sample * q_b, heads, packed, turns, q_weight, sums, first, seq_length, block * ROWS, num_heads,
            q_s, q_n, heads_s, heads_n, packed_s, to_sines, eps,
            K, HALF, ROWS, TOKENS, NORM, ROTATE,
        )  # fmt: skip
    elif block < Q_BLOCKS + KV_BLOCKS:
        _prepare_backward(
            grad_k + sample * k_b, keys, packed + num_heads * K, turns, k_weight, sums, first, seq_length,
            (block - Q_BLOCKS) * ROWS, num_kv_heads, k_s, k_n, heads_s, heads_n, packed_s, to_sines, eps,
            K, HALF, ROWS, TOKENS, NORM, ROTATE,
        )  # fmt: skip
    else:
        values = packed + (num_heads + num_kv_heads) * K
        _prepare_backward(
            grad_v + sample * v_b, keys, values, turns, k_weight, sums, first, seq_length,
            (block - Q_BLOCKS - KV_BLOCKS) * ROWS, num_kv_heads, v_s, v_n, heads_s, heads_n, packed_s, to_sines, eps,
            K, HALF, ROWS, TOKENS, False, False,
        )  # fmt: skip


@triton.jit
def _prepare_backward(
    grad,
    heads,
    packed,
    turns,
    weight,
    sums,
    first,
    seq_length,
    first_row,
    num_rows,
    grad_s,
    grad_n,
    heads_s,
    heads_n,
    packed_s,
    to_sines,
    eps,
    K: tl.constexpr,
    HALF: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    NORM: tl.constexpr,
    ROTATE: tl.constexpr,
):
    """Backward of rotation and norm for some rows: with n = x / rms(x), grad = (w g - n mean(w g n)) / rms(x)."""
    n = first_row + tl.arange(0, ROWS)[:, None]
    i = tl.arange(0, HALF)[None, :]
    inside = (n < num_rows) & (i < K // 2)
    if NORM:
        x_weight, y_weight = _halves(weight + i, i < K // 2, K)
        x_sum = tl.zeros((ROWS, HALF), tl.float32)
        y_sum = tl.zeros((ROWS, HALF), tl.float32)
    for position in range(first, tl.minimum(first + TOKENS, seq_length)):
        x_grad, y_grad = _halves(grad + position * grad_s + n * grad_n + i, inside, K)
        if ROTATE:
            cos, sin = _cos_sin(turns + position * (K // 2) + i, to_sines, i < K // 2)
            x_grad, y_grad = x_grad * cos + y_grad * sin, y_grad * cos - x_grad * sin
        if NORM:
            x, y = _halves(heads + position * heads_s + n * heads_n + i, inside, K)
            scale = _inverse_rms(x, y, eps, K)
            x, y = x * scale, y * scale
            x_sum += tl.where(inside, x_grad * x, 0.0)  # if eps is 0, a row outside is NaN
            y_sum += tl.where(inside, y_grad * y, 0.0)
            x_grad, y_grad = x_grad * x_weight, y_grad * y_weight
            mean = tl.sum(x_grad * x + y_grad * y, axis=1, keep_dims=True) / K
            x_grad, y_grad = (x_grad - x * mean) * scale, (y_grad - y * mean) * scale
        _write(packed + position * packed_s + n * K + i, x_grad, y_grad, inside, K)
    if NORM:
        half = tl.arange(0, HALF)
        tl.store(sums + half, tl.sum(x_sum, axis=0), mask=half < K // 2)
        tl.store(sums + K // 2 + half, tl.sum(y_sum, axis=0), mask=half < K // 2)


@triton.jit
def _halves(at, inside, K: tl.constexpr):
    """(tile of the rows' first halves, tile of their second halves), in fp32."""
    x = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(at + K // 2, mask=inside, other=0.0).to(tl.float32)
    return x, y


@triton.jit
def _cos_sin(at, to_sines, inside):
    cos = tl.load(at, mask=inside, other=0.0)
    sin = tl.load(at + to_sines, mask=inside, other=0.0)
    return cos, sin


@triton.jit
def _inverse_rms(x, y, eps, K: tl.constexpr):
    """[ROWS, 1]."""
    return tl.rsqrt(tl.sum(x * x + y * y, axis=1, keep_dims=True) / K + eps)


@triton.jit
def _write(at, x, y, inside, K: tl.constexpr):
    tl.store(at, x.to(at.dtype.element_ty), mask=inside)
    tl.store(at + K // 2, y.to(at.dtype.element_ty), mask=inside)
