"""The exchange of heads for positions. B batch, S sequence, H query heads, G KV heads, K head dim, R ranks.

                             queries              keys, values          (arXiv 2309.14509, figure 2)
outside, as weights make     [B, S/R, H, K]       [B, S/R, G, K]
repeated, where R needs it   [B, S/R, H, K]       [B, S/R, G', K]       G' = G times the least that R divides
inside, as the core takes    [B, S, H/R, K]       [B, S, G'/R, K]
"""

from collections.abc import Callable
from functools import partial
from math import gcd, prod

from torch import Tensor

import mplug_ops as ops
from mplug import Run, Site, Wrap
from mplug_nn import AttentionInputs, AttentionSpec

SEQUENCE, HEADS = 1, 2
"""Dimensions of the core's tensors."""


def around_attention(run: Run) -> Wrap:
    """The wrap of every attention core whose heads the ranks divide."""
    size, index = run.mesh.axes["ulys"].size, run.mesh.index(run.rank, "ulys")

    def supports(site: Site, run: Run) -> bool | str:
        heads = _local_heads(site, run)
        if heads % size:
            fitting = [str(degree) for degree in range(1, heads + 1) if heads % degree == 0]
            return f"ulys={size} does not divide the {heads} query heads of a rank; use ulys={' or '.join(fitting)}"
        return True

    wrap = partial(exchanged, run.group("ulys"), size, index)
    return Wrap("Attention.core", wrap, layer=50, supports=supports)


def _local_heads(site: Site, run: Run) -> int:
    """Query heads of the site that a rank has, once other strategies have divided the weights."""
    heads: int = site.module.num_heads
    return heads // prod(axis.size for axis in run.mesh.axes.values() if "heads" in axis.splits)


def exchanged(group: ops.Group, size: int, index: int, inner: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """An attention core for tensors whose sequence is divided, from one for whole sequences and part of the heads."""

    def core(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, inputs: AttentionInputs) -> Tensor:
        """q [B, S/R, H, K], k and v [B, S/R, G, K] -> [B, S/R, H, K]."""
        repeats = kv_repeats(q.shape[HEADS], k.shape[HEADS], size)
        k, v = (x.repeat_interleave(repeats, dim=HEADS) if repeats > 1 else x for x in (k, v))  # [B, S/R, G', K]
        q, k, v = (ops.exchange(x, group, HEADS, SEQUENCE) for x in (q, k, v))
        inputs = inputs._replace(first_head=inputs.first_head + index * q.shape[HEADS])
        return ops.exchange(inner(q, k, v, spec, inputs), group, SEQUENCE, HEADS)

    return core


def kv_repeats(heads: int, kv_heads: int, size: int) -> int:
    """How often each KV head must be repeated so that every rank gets those of its query heads, and equally many each.

    H/R query heads of a rank lie in blocks of gcd(H/R, H/G), the longest that never straddle a KV head's or a rank's
    border; each block takes one KV head.
    """
    per_rank, per_kv_head = heads // size, heads // kv_heads
    return per_kv_head // gcd(per_rank, per_kv_head)
