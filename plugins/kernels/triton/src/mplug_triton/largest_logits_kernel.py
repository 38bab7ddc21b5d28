"""The Triton kernel of the largest attention logits.

B batch, S queries, T keys, H query heads, K width of a key, M queries of a tile, N keys of a tile. As in attention,
each query sees an interval of keys (`mplug_triton.sight`), and a program visits the tiles of these intervals only.
"""
# ruff: noqa: N803 (compile-time constants are in capitals, as is usual in Triton)

import triton
import triton.language as tl

from mplug_triton.attention_kernels import _tile


@triton.jit(do_not_specialize=["S", "T", "H", "sharers", "sight_b"])
def triton_largest_logits(
    q, k, found, first, end, q_b, q_s, q_h, k_b, k_s, k_h, sight_b, S, T, H, sharers,
    K: tl.constexpr, WIDTH: tl.constexpr, M: tl.constexpr, N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """found [B, H, tiles] in fp32: the largest product of a query of a tile and a key that it sees."""
    tiles = tl.cdiv(S, M)
    tile, head = tiles - 1 - tl.program_id(0) % tiles, tl.program_id(0) // tiles  # the longest intervals first
    b, h = (head // H).to(tl.int64), head % H
    q += b * q_b + h.to(tl.int64) * q_h
    k += b * k_b + (h // sharers).to(tl.int64) * k_h
    rows = tl.minimum(tile * M + tl.arange(0, M), S - 1)  # the last query again, where a tile exceeds them
    low, high = tl.load(first + b * sight_b + rows), tl.load(end + b * sight_b + rows)
    i = tl.arange(0, WIDTH)
    pointers = q + rows.to(tl.int64)[:, None] * q_s + i[None, :]
    queries = tl.load(pointers) if K == WIDTH else tl.load(pointers, mask=(i < K)[None, :], other=0.0)
    most = tl.full([M, N], float("-inf"), tl.float32)  # reduced after the last tile only
    begin, stop = tl.min(low, 0) // N * N, tl.max(high, 0)
    inner_begin, inner_stop = tl.cdiv(tl.max(low, 0), N) * N, tl.min(high, 0) // N * N
    if inner_begin >= inner_stop:
        inner_begin = tl.cdiv(tl.maximum(stop, begin), N) * N
        inner_stop = inner_begin
    for j in range(begin, tl.minimum(inner_begin, stop), N):
        most = _raise(most, queries, k, j, T, k_s, low, high, K, WIDTH, N, True, PRECISION)
    for j in range(inner_begin, inner_stop, N):
        most = _raise(most, queries, k, j, T, k_s, low, high, K, WIDTH, N, False, PRECISION)
    for j in range(inner_stop, stop, N):
        most = _raise(most, queries, k, j, T, k_s, low, high, K, WIDTH, N, True, PRECISION)
    tl.store(found + head.to(tl.int64) * tiles + tile, tl.max(tl.max(most, 1), 0))


@triton.jit
def _raise(
    most, queries, k, j, T, k_s, low, high,
    K: tl.constexpr, WIDTH: tl.constexpr, N: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The running maxima [M, N] with the products of the keys j to j + N - 1."""
    keys = _tile(k, j, T, k_s, N, K, WIDTH, not MASKED)
    products = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
    if MASKED:
        t = (j + tl.arange(0, N))[None, :]
        products = tl.where((t >= low[:, None]) & (t < high[:, None]), products, float("-inf"))
    return tl.maximum(most, products)
