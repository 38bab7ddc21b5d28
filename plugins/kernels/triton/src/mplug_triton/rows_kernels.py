"""The Triton kernels that move rows to experts and back. N tokens, k choices of a token, D width, E experts.

Rows are contiguous. A program of the movements processes a tile [ROWS, WIDTH] of whole rows of tokens; WIDTH is D
rounded up to a power of two. A token's row is read or written once for all of its choices.
"""
# ruff: noqa: N803 (compile-time constants are in capitals, as is usual in Triton)

import triton
import triton.language as tl


@triton.jit
def triton_rank_rows(chosen, ranks, counts, num_choices, num_blocks, CHOICES: tl.constexpr):
    """The rank of each choice among those of its expert in its block, and the choices of each expert in each block.

    chosen [N k] int64 (0 to E), ranks [N k] int32, counts [E + 1, blocks] int32, which begin as zeros.
    """
    block = tl.program_id(0)
    i, j = tl.arange(0, CHOICES), tl.arange(0, CHOICES)
    at = block * CHOICES + i
    inside = at < num_choices
    own = tl.load(chosen + at, mask=inside, other=-1)
    other = tl.load(chosen + block * CHOICES + j, mask=block * CHOICES + j < num_choices, other=-2)
    same = own[:, None] == other[None, :]
    rank = tl.sum((same & (j[None, :] < i[:, None])).to(tl.int32), axis=1)
    later = tl.sum((same & (j[None, :] > i[:, None])).to(tl.int32), axis=1)
    tl.store(ranks + at, rank, mask=inside)
    tl.store(counts + own * num_blocks + block, rank + 1, mask=inside & (later == 0))


@triton.jit
def triton_place_rows(chosen, ranks, ends, counts, order, back, num_choices, num_blocks, CHOICES: tl.constexpr):
    """The place of each choice among the rows, ordered by expert and then by choice, and the choice of each place.

    ends [E + 1, blocks] int64 is the running sum of `counts`, which has the same shape; order and back [N k] int64.
    """
    block = tl.program_id(0)
    at = block * CHOICES + tl.arange(0, CHOICES)
    inside = at < num_choices
    cell = tl.load(chosen + at, mask=inside, other=0) * num_blocks + block
    start = tl.load(ends + cell, mask=inside, other=0) - tl.load(counts + cell, mask=inside, other=0)
    place = start + tl.load(ranks + at, mask=inside, other=0)
    tl.store(back + at, place, mask=inside)
    tl.store(order + place, at.to(tl.int64), mask=inside)


@triton.jit
def triton_spread_rows(
    x,
    back,
    total,
    gates,
    rows,
    spread,
    products,
    num_tokens,
    D: tl.constexpr,
    CHOICES: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    WEIGH: tl.constexpr,
):
    """spread[back[n, j]] = x[n], with WEIGH times gates[n, j]; then also products[n, j] = rows[back[n, j]] . x[n].

    A dropped choice (its place is not below `total`) writes no row, and its product is 0.
    """
    token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    i = tl.arange(0, WIDTH)[None, :]
    known = token < num_tokens
    own = tl.load(x + token * D + i, mask=known & (i < D), other=0.0)
    end = tl.load(total)
    for j in range(CHOICES):
        choice = token * CHOICES + j
        place = tl.load(back + choice, mask=known, other=0)
        kept = known & (place < end)
        inside = kept & (i < D)
        if WEIGH:
            wide = own.to(tl.float32)
            result = tl.load(rows + place * D + i, mask=inside, other=0.0).to(tl.float32)
            tl.store(products + choice, tl.sum(result * wide, axis=1, keep_dims=True), mask=known)
            weighed = wide * tl.load(gates + choice, mask=kept, other=0.0)
            tl.store(spread + place * D + i, weighed.to(spread.dtype.element_ty), mask=inside)
        else:
            tl.store(spread + place * D + i, own, mask=inside)


@triton.jit
def triton_gather_rows(
    rows,
    back,
    total,
    gates,
    y,
    num_tokens,
    D: tl.constexpr,
    CHOICES: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    WEIGH: tl.constexpr,
):
    """y[n] = sum_j rows[back[n, j]], with WEIGH times gates[n, j]; without the dropped choices."""
    token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    i = tl.arange(0, WIDTH)[None, :]
    known = token < num_tokens
    end = tl.load(total)
    summed = tl.zeros([ROWS, WIDTH], dtype=tl.float32)
    for j in range(CHOICES):
        choice = token * CHOICES + j
        place = tl.load(back + choice, mask=known, other=0)
        kept = known & (place < end)
        result = tl.load(rows + place * D + i, mask=kept & (i < D), other=0.0).to(tl.float32)
        if WEIGH:
            result *= tl.load(gates + choice, mask=kept, other=0.0)
        summed += result
    tl.store(y + token * D + i, summed.to(y.dtype.element_ty), mask=known & (i < D))
