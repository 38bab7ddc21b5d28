"""Attention over all-gathered keys and values (Llama 3, arXiv 2407.21783, section 3.3.2), as torch operators.

B batch, S local length, H query heads, G KV heads, K head dim, R ranks.

    forward    all-gather    k and v [B, S, G, K] -> [2, B, R S, G, K]; in causal attention and with windows, the rank
                             computes the part of its own keys meanwhile
    backward   all-gather    again, because a rank saves only its own keys and values
               reduce-scatter (the dual)    dk and dv [2, B, R S, G, K] -> [2, B, S, G, K]
"""

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from mplug_cp.blocks import blocks_of_all, own_block
from mplug_cp.operators import Call, Operator, operator_of
from mplug_cp.totals import Backward, Forward, add_to, wide
from mplug_cp.zigzag import chunks_held, held_at
from mplug_nn.parts import AttentionParts
from mplug_ops.transfers import gathering, group_named, summing


def in_order(gathered: Tensor) -> Tensor:
    """The ranks' keys and values [R, 2, B, S, G, K], two zigzag chunks each, in sequence order: [2, B, R S, G, K]."""
    size = len(gathered)
    chunks = gathered.movedim(0, 2).unflatten(3, (2, -1)).flatten(2, 3)  # [2, B, 2R, S/2, G, K]
    return torch.stack([chunks[:, :, place] for place in held_at(size)], dim=2).flatten(2, 3)


def by_rank(whole: Tensor, size: int) -> Tensor:
    """The inverse of `in_order`: [2, B, R S, G, K] -> [R, 2, B, S, G, K]."""
    chunks = whole.unflatten(2, (2 * size, -1))  # [2, B, 2R, S/2, G, K]
    held = torch.stack([chunks[:, :, chunk] for chunk in chunks_held(size)])  # [2R, 2, B, S/2, G, K]
    return held.unflatten(0, (size, 2)).movedim(1, 3).flatten(3, 4)


def _attend(parts: AttentionParts, q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    total, ranks, sight = Forward(parts, q, call.seen, call.sinks), group_named(call.group), call.sight
    where = (ranks.rank(), ranks.size(), k.shape[1])
    coming = gathering(torch.stack((k, v)), ranks)
    if sight.own_first:
        total.add(own_block(*where, sight), k, v)
    whole = in_order(coming.wait())
    for block in blocks_of_all(*where, sight):
        total.add(block, *whole)
    return total.result()


def _differentiate(
    parts: AttentionParts, grad: Tensor, q: Tensor, keys: Sequence[Tensor], output: Tensor, sums: Tensor, call: Call
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    total, sight = Backward(parts, grad, q, output, sums, call.seen, call.sinks), call.sight
    (k, v), ranks = keys, group_named(call.group)
    where = (ranks.rank(), ranks.size(), k.shape[1])
    coming = gathering(torch.stack((k, v)), ranks)
    own = own_block(*where, sight)
    of_own = total.of(own, k, v) if sight.own_first else None
    whole = in_order(coming.wait())
    of_whole = torch.zeros(whole.shape, dtype=wide(k), device=k.device)
    for block in blocks_of_all(*where, sight):
        add_to(of_whole, block, total.of(block, *whole))
    dkv = summing(by_rank(of_whole, ranks.size()), ranks).wait()
    if of_own is not None:
        add_to(dkv, own, of_own)
    dq, of_sinks = total.result()
    dk, dv = (x.to(k.dtype, copy=True) for x in dkv)
    return dq, dk, dv, of_sinks


@cache
def gathered_of(parts: AttentionParts) -> Operator:
    """The operator of attention over gathered keys, built from a supplier's parts; one operator per `parts`.

    Dual: grad [B, S, H, K] -> dq [B, S, H, K], dk and dv [B, S, G, K], and the sinks' gradient [H]. Forward gathers k
    and v; backward sums dk and dv over the ranks and returns each rank its own part.
    """
    return operator_of(f"gathered_{parts.name}", parts, _attend, _differentiate)
