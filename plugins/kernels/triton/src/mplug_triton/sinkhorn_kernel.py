"""The Triton kernel of Sinkhorn's balanced shares. B batch, S tokens of a sequence, E experts.

WIDTH is E rounded up to a power of two, and TOKENS the tokens of a tile. One program has a whole sequence and visits
its tiles once a round; `supports_balance` bounds a sequence such that they stay in the cache of a multiprocessor.
"""
# ruff: noqa: N803 (compile-time constants are in capitals, as is usual in Triton)

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["length", "even"])
def triton_sinkhorn(
    logits,
    shares,
    length,
    even,
    E: tl.constexpr,
    WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,
    ROUNDS: tl.constexpr,
):
    """shares [B, S, E] fp32 of logits [B, S, E], as `mplug_nn.scores.sinkhorn`; even = log(S / E).

    With a = of_expert, a round is a += even - log(sum over tokens of softmax(logits + a)). The first round has a = 0,
    and the sum of an expert that no token likes could be 0 in fp32: it subtracts the largest term. Later sums are at
    least 1 / E: after a round, exp(logits + factors of tokens + a) has the sum S / E for each expert, and the tokens'
    new factors divide it by the sum of a token, which is at most S.
    """
    first = tl.program_id(0).to(tl.int64) * length * E
    logits += first
    shares += first
    t, e = tl.arange(0, TOKENS)[:, None], tl.arange(0, WIDTH)[None, :]
    most = tl.full([TOKENS, WIDTH], float("-inf"), tl.float32)
    total = tl.zeros([TOKENS, WIDTH], tl.float32)
    for start in range(0, length, TOKENS):
        x = _logits(logits, 0.0, start + t, e, length, E)
        largest = tl.max(x, 1, keep_dims=True)
        x -= largest + tl.log(tl.sum(tl.exp(x - largest), 1, keep_dims=True))
        x = tl.where(start + t < length, x, float("-inf"))
        higher = tl.maximum(most, x)
        lifted = tl.where(higher == float("-inf"), 0.0, higher)  # so that no difference is NaN
        total = total * tl.exp(most - lifted) + tl.exp(x - lifted)
        most = higher
    largest = tl.where(e < E, tl.max(most, 0, keep_dims=True), 0.0)
    summed = tl.sum(total * tl.exp(most - largest), 0, keep_dims=True)
    of_expert = even - largest - tl.log(tl.where(e < E, summed, 1.0))
    for _ in range(1, ROUNDS):
        total = tl.zeros([TOKENS, WIDTH], tl.float32)
        for start in range(0, length, TOKENS):
            total += tl.where(start + t < length, _shares(logits, of_expert, start + t, e, length, E), 0.0)
        summed = tl.sum(total, 0, keep_dims=True)
        of_expert += even - tl.log(tl.where(e < E, summed, 1.0))
    for start in range(0, length, TOKENS):
        result = _shares(logits, of_expert, start + t, e, length, E)
        tl.store(shares + (start + t) * E + e, result, mask=(start + t < length) & (e < E))


@triton.jit
def _shares(logits, of_expert, t, e, length, E: tl.constexpr):
    """softmax(logits + of_expert) of the tokens t; without meaning for those after the last one."""
    x = _logits(logits, of_expert, t, e, length, E)
    x = tl.exp(x - tl.max(x, 1, keep_dims=True))
    return x * (1.0 / tl.sum(x, 1, keep_dims=True))


@triton.jit
def _logits(logits, of_expert, t, e, length, E: tl.constexpr):
    """logits + of_expert of the tokens t; -inf where WIDTH exceeds E."""
    x = tl.load(logits + t * E + e, mask=(t < length) & (e < E), other=0.0).to(tl.float32)
    return tl.where(e < E, x + of_expert, float("-inf"))
