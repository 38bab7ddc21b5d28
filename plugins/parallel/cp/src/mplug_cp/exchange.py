"""Ulysses (arXiv 2309.14509): exchanges a split of the sequence for a split of the heads around attention.

B batch, S sequence, H query heads, G KV heads, G' KV heads with copies, K head dim, R ranks.

                                     queries             keys and values
as the ranks hold the sequence       [B, S/R, H, K]      [B, S/R, G, K]
with copies of KV heads if needed    [B, S/R, H, K]      [B, S/R, G', K]
as the core computes                 [B, S, H/R, K]      [B, S, G'/R, K]

The output is exchanged back to [B, S/R, H, K]. The dual of an exchange is the exchange with both dimensions swapped.
"""

from collections.abc import Callable
from math import gcd

from torch import Tensor

import mplug_ops as ops
from mplug_nn import AttentionInputs, AttentionSpec

SEQUENCE, HEADS = 1, 2
"""The sequence and head dimensions of the core's tensors."""


def exchanged(group: ops.Group, size: int, index: int, inner: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap `inner`, a core over the whole sequence and some heads, into a core over a part of the sequence.

    `group` has `size` ranks; this rank is number `index`.
    """

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
    """The smallest number of copies of each KV head that gives every rank exactly the KV heads of its query heads.

    A copy serves consecutive query heads that belong to one rank and share one KV head. Their number is the greatest
    common divisor of the query heads per rank and the query heads per KV head.
    """
    sharers = heads // kv_heads
    return sharers // gcd(heads // size, sharers)
