"""The Triton kernels of attention with windows, documents, soft caps and attention sinks.

B batch, S queries, T keys, H query heads, G KV heads, K head dim, M queries of a tile, N keys of a tile. The algorithm
is FlashAttention-2 (arXiv 2307.08691). Each query sees an interval of keys (`mplug_triton.sight`), and each key is seen
by an interval of queries. A program visits the tiles of these intervals only, and masks only those it sees in part.

Scores are in units of log 2, so their exponential is exp2. Offsets along the sequence are int64: a sequence of a
million tokens with 64 heads of 128 has more than 2^31 numbers. Nothing is added by atomic operations. Kernels are not
specialized to sizes (`do_not_specialize`): no address is better aligned because of them, and each costs a compilation.
"""
# ruff: noqa: N803 (compile-time constants are in capitals, as is usual in Triton)

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _tile(
    base, start, rows_in_all, stride, ROWS: tl.constexpr, K: tl.constexpr, WIDTH: tl.constexpr, INSIDE: tl.constexpr
):
    """Rows start to start + ROWS of a matrix [., K] as [ROWS, WIDTH], zeros outside; INSIDE: all rows exist."""
    n, i = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    pointers = base + tl.cast(start, tl.int64) * stride + n[:, None] * stride + i[None, :]
    if INSIDE and K == WIDTH:
        return tl.load(pointers)
    if INSIDE:
        return tl.load(pointers, mask=(i < K)[None, :], other=0.0)
    if K == WIDTH:
        return tl.load(pointers, mask=(start + n < rows_in_all)[:, None], other=0.0)
    return tl.load(pointers, mask=(start + n < rows_in_all)[:, None] & (i < K)[None, :], other=0.0)


@triton.jit
def _store(base, start, rows_in_all, stride, x, ROWS: tl.constexpr, K: tl.constexpr, WIDTH: tl.constexpr):
    n, i = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    pointers = base + tl.cast(start, tl.int64) * stride + n[:, None] * stride + i[None, :]
    tl.store(pointers, x.to(base.dtype.element_ty), mask=(start + n < rows_in_all)[:, None] & (i < K)[None, :])


@triton.jit
def _tanh(x):
    """tanh by one exp2; its absolute error is that of fp32 around 1."""
    small = tl.exp2(-2 * LOG2_E * tl.abs(x))
    y = (1 - small) / (1 + small)
    return tl.where(x < 0, -y, y)


@triton.jit
def _scores(products, scale, cap, CAPPED: tl.constexpr):
    """(scores in units of log 2, tanh of the scores / cap) of q kᵀ."""
    if CAPPED:
        turned = _tanh(products * (scale / cap))
        return turned * (cap * LOG2_E), turned
    return products * (scale * LOG2_E), products


@triton.jit(do_not_specialize=["S", "T", "H", "sharers", "sight_b"])
def triton_attention(
    q, k, v, sinks, out, sums, first, end,
    q_b, q_s, q_h, k_b, k_s, k_h, v_b, v_s, v_h, sight_b,
    S, T, H, sharers, scale, cap,
    K: tl.constexpr, WIDTH: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    CAPPED: tl.constexpr, SINKS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out [B, S, H, K] and the log-sum-exp [B, H, S], both contiguous. A program has M queries of one head."""
    tiles = tl.cdiv(S, M)
    tile, head = tiles - 1 - tl.program_id(0) % tiles, tl.program_id(0) // tiles  # the longest intervals first
    b, h = (head // H).to(tl.int64), head % H
    q += b * q_b + h.to(tl.int64) * q_h
    k += b * k_b + (h // sharers).to(tl.int64) * k_h
    v += b * v_b + (h // sharers).to(tl.int64) * v_h
    start = tile * M
    rows = start + tl.arange(0, M)
    low = tl.load(first + b * sight_b + tl.minimum(rows, S - 1))
    high = tl.load(end + b * sight_b + tl.minimum(rows, S - 1))
    queries = _tile(q, start, S, q_s, M, K, WIDTH, False)
    if SINKS:  # a score without a value
        most = tl.full([M], 0.0, tl.float32) + tl.load(sinks + h).to(tl.float32) * LOG2_E
        total = tl.full([M], 1.0, tl.float32)
    else:
        most = tl.full([M], float("-inf"), tl.float32)
        total = tl.zeros([M], tl.float32)
    sum_ = tl.zeros([M, WIDTH], tl.float32)
    begin, stop = tl.min(low, 0) // N * N, tl.max(high, 0)
    inner_begin, inner_stop = tl.cdiv(tl.max(low, 0), N) * N, tl.min(high, 0) // N * N
    if inner_begin >= inner_stop:
        inner_begin = tl.cdiv(tl.maximum(stop, begin), N) * N
        inner_stop = inner_begin
    for j in range(begin, tl.minimum(inner_begin, stop), N):
        most, total, sum_ = _attend(
            queries, k, v, j, T, k_s, v_s, low, high, most, total, sum_, scale, cap,
            K, WIDTH, N, CAPPED, True, PRECISION,
        )  # fmt: skip
    for j in range(inner_begin, inner_stop, N):
        most, total, sum_ = _attend(
            queries, k, v, j, T, k_s, v_s, low, high, most, total, sum_, scale, cap,
            K, WIDTH, N, CAPPED, False, PRECISION,
        )  # fmt: skip
    for j in range(inner_stop, stop, N):
        most, total, sum_ = _attend(
            queries, k, v, j, T, k_s, v_s, low, high, most, total, sum_, scale, cap,
            K, WIDTH, N, CAPPED, True, PRECISION,
        )  # fmt: skip
    empty = total == 0.0  # no key, and no sink
    sum_ = sum_ / tl.where(empty, 1.0, total)[:, None]
    natural = tl.where(empty, float("-inf"), (most + tl.log2(tl.where(empty, 1.0, total))) / LOG2_E)
    tl.store(sums + head.to(tl.int64) * S + rows, natural, mask=rows < S)
    width = H * K
    _store(out + b * S * width + h * K, start, S, width, sum_, M, K, WIDTH)


@triton.jit
def _attend(
    queries, k, v, j, T, k_s, v_s, low, high, most, total, sum_, scale, cap,
    K: tl.constexpr, WIDTH: tl.constexpr, N: tl.constexpr,
    CAPPED: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add the keys j to j + N - 1 to the running maxima, totals and sums of a tile of queries."""
    keys = _tile(k, j, T, k_s, N, K, WIDTH, not MASKED)
    products = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
    scores, _ = _scores(products, scale, cap, CAPPED)
    if MASKED:
        t = (j + tl.arange(0, N))[None, :]
        scores = tl.where((t >= low[:, None]) & (t < high[:, None]), scores, float("-inf"))
    raised = tl.maximum(most, tl.max(scores, 1))
    base = tl.where(raised == float("-inf"), 0.0, raised)  # a query that has seen no key yet
    weights = tl.exp2(scores - base[:, None])
    factor = tl.exp2(most - base)
    total = total * factor + tl.sum(weights, 1)
    values = _tile(v, j, T, v_s, N, K, WIDTH, not MASKED)
    sum_ = tl.dot(weights.to(values.dtype), values, sum_ * factor[:, None], input_precision=PRECISION)
    return raised, total, sum_


@triton.jit(do_not_specialize=["S", "H"])
def triton_row_sums(
    out, grad, inner, out_b, out_s, out_h, grad_b, grad_s, grad_h, S, H,
    K: tl.constexpr, WIDTH: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    """inner [B, H, S]: the inner product of each row of the output with its gradient, in fp32."""
    tiles = tl.cdiv(S, M)
    start, head = tl.program_id(0) % tiles * M, tl.program_id(0) // tiles
    b, h = (head // H).to(tl.int64), (head % H).to(tl.int64)
    x = _tile(out + b * out_b + h * out_h, start, S, out_s, M, K, WIDTH, False).to(tl.float32)
    y = _tile(grad + b * grad_b + h * grad_h, start, S, grad_s, M, K, WIDTH, False).to(tl.float32)
    rows = start + tl.arange(0, M)
    tl.store(inner + head.to(tl.int64) * S + rows, tl.sum(x * y, 1), mask=rows < S)


@triton.jit(do_not_specialize=["S", "T", "H", "sharers", "sight_b"])
def triton_attention_dq(
    q, k, v, grad, sums, inner, dq, first, end,
    q_b, q_s, q_h, k_b, k_s, k_h, v_b, v_s, v_h, grad_b, grad_s, grad_h, sight_b,
    S, T, H, sharers, scale, cap,
    K: tl.constexpr, WIDTH: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    CAPPED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq [B, S, H, K], contiguous. A program has M queries of one head."""
    tiles = tl.cdiv(S, M)
    tile, head = tiles - 1 - tl.program_id(0) % tiles, tl.program_id(0) // tiles
    b, h = (head // H).to(tl.int64), head % H
    q += b * q_b + h.to(tl.int64) * q_h
    grad += b * grad_b + h.to(tl.int64) * grad_h
    k += b * k_b + (h // sharers).to(tl.int64) * k_h
    v += b * v_b + (h // sharers).to(tl.int64) * v_h
    start = tile * M
    rows = start + tl.arange(0, M)
    low = tl.load(first + b * sight_b + tl.minimum(rows, S - 1))
    high = tl.load(end + b * sight_b + tl.minimum(rows, S - 1))
    queries = _tile(q, start, S, q_s, M, K, WIDTH, False)
    grads = _tile(grad, start, S, grad_s, M, K, WIDTH, False).to(queries.dtype)
    base = tl.load(sums + head.to(tl.int64) * S + rows, mask=rows < S, other=float("inf")) * LOG2_E
    own = tl.load(inner + head.to(tl.int64) * S + rows, mask=rows < S, other=0.0)
    sum_ = tl.zeros([M, WIDTH], tl.float32)
    begin, stop = tl.min(low, 0) // N * N, tl.max(high, 0)
    inner_begin, inner_stop = tl.cdiv(tl.max(low, 0), N) * N, tl.min(high, 0) // N * N
    if inner_begin >= inner_stop:
        inner_begin = tl.cdiv(tl.maximum(stop, begin), N) * N
        inner_stop = inner_begin
    for j in range(begin, tl.minimum(inner_begin, stop), N):
        sum_ = _add_dq(
            queries, grads, k, v, j, T, k_s, v_s, low, high, base, own, sum_, scale, cap,
            K, WIDTH, N, CAPPED, True, PRECISION,
        )  # fmt: skip
    for j in range(inner_begin, inner_stop, N):
        sum_ = _add_dq(
            queries, grads, k, v, j, T, k_s, v_s, low, high, base, own, sum_, scale, cap,
            K, WIDTH, N, CAPPED, False, PRECISION,
        )  # fmt: skip
    for j in range(inner_stop, stop, N):
        sum_ = _add_dq(
            queries, grads, k, v, j, T, k_s, v_s, low, high, base, own, sum_, scale, cap,
            K, WIDTH, N, CAPPED, True, PRECISION,
        )  # fmt: skip
    width = H * K
    _store(dq + b * S * width + h * K, start, S, width, sum_ * scale, M, K, WIDTH)


@triton.jit
def _add_dq(
    queries, grads, k, v, j, T, k_s, v_s, low, high, base, own, sum_, scale, cap,
    K: tl.constexpr, WIDTH: tl.constexpr, N: tl.constexpr,
    CAPPED: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    keys = _tile(k, j, T, k_s, N, K, WIDTH, not MASKED)
    values = _tile(v, j, T, v_s, N, K, WIDTH, not MASKED)
    scores, turned = _scores(tl.dot(queries, tl.trans(keys), input_precision=PRECISION), scale, cap, CAPPED)
    weights = tl.exp2(scores - base[:, None])
    if MASKED:
        t = (j + tl.arange(0, N))[None, :]
        weights = tl.where((t >= low[:, None]) & (t < high[:, None]), weights, 0.0)
    of_scores = weights * (tl.dot(grads, tl.trans(values), input_precision=PRECISION) - own[:, None])
    if CAPPED:
        of_scores *= 1 - turned * turned
    return tl.dot(of_scores.to(keys.dtype), keys, sum_, input_precision=PRECISION)


@triton.jit(do_not_specialize=["S", "T", "H", "G", "sharers", "sight_b", "ranges_b"])
def triton_attention_dk_dv(
    q, k, v, grad, sums, inner, dk, dv, first, end, ranges,
    q_b, q_s, q_h, k_b, k_s, k_h, v_b, v_s, v_h, grad_b, grad_s, grad_h, sight_b, ranges_b,
    S, T, H, G, sharers, scale, cap,
    K: tl.constexpr, WIDTH: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    CAPPED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dk and dv [B, T, G, K], contiguous. A program has N keys of one KV head, and sums over its query heads in order.

    `ranges` [1 or B, tiles of keys, 4]: the first query that sees a key of the tile, the first and the end of those
    that see all its keys, and the end of those that see one.
    """
    tiles = tl.cdiv(T, N)
    tile, head = tl.program_id(0) % tiles, tl.program_id(0) // tiles
    b, g = (head // G).to(tl.int64), head % G
    k += b * k_b + g.to(tl.int64) * k_h
    v += b * v_b + g.to(tl.int64) * v_h
    first += b * sight_b
    end += b * sight_b
    ranges += b * ranges_b + tile * 4
    begin, stop = tl.load(ranges) // M * M, tl.load(ranges + 3)
    inner_begin, inner_stop = tl.cdiv(tl.load(ranges + 1), M) * M, tl.load(ranges + 2) // M * M
    if inner_begin >= inner_stop:
        inner_begin = tl.cdiv(tl.maximum(stop, begin), M) * M
        inner_stop = inner_begin
    start = tile * N
    keys = _tile(k, start, T, k_s, N, K, WIDTH, False)
    values = _tile(v, start, T, v_s, N, K, WIDTH, False)
    of_keys, of_values = tl.zeros([N, WIDTH], tl.float32), tl.zeros([N, WIDTH], tl.float32)
    for share in range(sharers):
        h = (g * sharers + share).to(tl.int64)
        own_q, own_grad = q + b * q_b + h * q_h, grad + b * grad_b + h * grad_h
        own_sums, own_inner = sums + (b * H + h) * S, inner + (b * H + h) * S
        for i in range(begin, tl.minimum(inner_begin, stop), M):
            of_keys, of_values = _add_dk_dv(
                keys, values, own_q, own_grad, own_sums, own_inner, i, start, S, q_s, grad_s, first, end,
                of_keys, of_values, scale, cap, K, WIDTH, M, N, CAPPED, True, PRECISION,
            )  # fmt: skip
        for i in range(inner_begin, inner_stop, M):
            of_keys, of_values = _add_dk_dv(
                keys, values, own_q, own_grad, own_sums, own_inner, i, start, S, q_s, grad_s, first, end,
                of_keys, of_values, scale, cap, K, WIDTH, M, N, CAPPED, False, PRECISION,
            )  # fmt: skip
        for i in range(inner_stop, stop, M):
            of_keys, of_values = _add_dk_dv(
                keys, values, own_q, own_grad, own_sums, own_inner, i, start, S, q_s, grad_s, first, end,
                of_keys, of_values, scale, cap, K, WIDTH, M, N, CAPPED, True, PRECISION,
            )  # fmt: skip
    width = G * K
    _store(dk + b * T * width + g * K, start, T, width, of_keys * scale, N, K, WIDTH)
    _store(dv + b * T * width + g * K, start, T, width, of_values, N, K, WIDTH)


@triton.jit
def _add_dk_dv(
    keys, values, q, grad, sums, inner, i, start, S, q_s, grad_s, first, end, of_keys, of_values, scale, cap,
    K: tl.constexpr, WIDTH: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    CAPPED: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Scores are transposed: [N, M]."""
    rows = i + tl.arange(0, M)
    queries = _tile(q, i, S, q_s, M, K, WIDTH, not MASKED)
    grads = _tile(grad, i, S, grad_s, M, K, WIDTH, not MASKED).to(queries.dtype)
    base = tl.load(sums + rows, mask=rows < S, other=float("inf")) * LOG2_E
    own = tl.load(inner + rows, mask=rows < S, other=0.0)
    scores, turned = _scores(tl.dot(keys, tl.trans(queries), input_precision=PRECISION), scale, cap, CAPPED)
    weights = tl.exp2(scores - base[None, :])
    if MASKED:
        low = tl.load(first + rows, mask=rows < S, other=0)
        high = tl.load(end + rows, mask=rows < S, other=0)
        t = (start + tl.arange(0, N))[:, None]
        weights = tl.where((t >= low[None, :]) & (t < high[None, :]), weights, 0.0)
    of_values = tl.dot(weights.to(grads.dtype), grads, of_values, input_precision=PRECISION)
    of_scores = weights * (tl.dot(values, tl.trans(grads), input_precision=PRECISION) - own[None, :])
    if CAPPED:
        of_scores *= 1 - turned * turned
    of_keys = tl.dot(of_scores.to(queries.dtype), queries, of_keys, input_precision=PRECISION)
    return of_keys, of_values
