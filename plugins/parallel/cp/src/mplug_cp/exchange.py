"""Heads for positions (Ulysses, arXiv 2309.14509). B batch, S sequence, H query heads, G KV heads, K head dim, R ranks.

                                     queries             keys and values
as the ranks hold the sequence       [B, S/R, H, K]      [B, S/R, G, K]
with copies, where R needs them      [B, S/R, H, K]      [B, S/R, G', K]
as the core computes                 [B, S, H/R, K]      [B, S, G'/R, K]
"""

from collections.abc import Callable
from math import gcd

from torch import Tensor

from mplug import ops
from mplug.nn import AttentionInputs, AttentionSpec

SEQUENCE, HEADS = 1, 2
"""Dimensions of the core's tensors."""


def exchanged(group: ops.Group, size: int, index: int, inner: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """An attention core of a divided sequence, from one of the whole sequence and a part of the heads."""

    def core(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, inputs: AttentionInputs) -> Tensor:
        """q [B, S/R, H, K], k [B, S/R, G, K] and v [B, S/R, G, V] -> [B, S/R, H, V]."""
        copies = copies_of_kv(q.shape[HEADS], k.shape[HEADS], size)
        k, v = (x.repeat_interleave(copies, dim=HEADS) if copies > 1 else x for x in (k, v))
        q, k, v = (ops.exchange(x, group, HEADS, SEQUENCE) for x in (q, k, v))
        first, heads = index * q.shape[HEADS], q.shape[HEADS]
        own = inputs._replace(
            sinks=None if inputs.sinks is None else inputs.sinks[first : first + heads],
            bias_table=None if inputs.bias_table is None else inputs.bias_table[first : first + heads],
            first_head=inputs.first_head + first,
        )
        return ops.exchange(inner(q, k, v, spec, own), group, SEQUENCE, HEADS)

    return core


def copies_of_kv(heads: int, kv_heads: int, size: int) -> int:
    """The fewest copies of each KV head with which every rank gets those of its own query heads, and no others.

    A copy serves neighbouring query heads that neither a rank's border nor a KV head's divides: as many as the greatest
    common divisor of a rank's query heads and of those that share a KV head.
    """
    sharers = heads // kv_heads
    return sharers // gcd(heads // size, sharers)
