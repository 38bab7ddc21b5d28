"""Attention over all-gathered keys and values (Llama 3, arXiv 2407.21783, section 3.3.2), as torch operators.

B batch, S local length, H query heads, G KV heads, K head dim, R ranks.

    forward    all-gather    k and v [B, S, G, K] -> [2, B, R S, G, K]; in causal attention and with windows, the rank
                             computes the part of its own keys meanwhile
    backward   all-gather    again, because a rank saves only its own keys and values
               reduce-scatter (the dual)    dk and dv [2, B, R S, G, K] -> [2, B, S, G, K]
"""

from collections.abc import Callable
from functools import cache
from typing import Any, Optional

import torch
from torch import Tensor

from mplug_cp.blocks import Sight, blocks_of_all, own_block
from mplug_cp.totals import Backward, Forward, Seen, add_to, differentiated, wide
from mplug_cp.zigzag import chunks_held, held_at
from mplug_nn.parts import AttentionParts
from mplug_ops.transfers import gathering, group_named, summing

Operator = Callable[..., tuple[Tensor, Tensor]]


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


def _forward(total: Forward, k: Tensor, v: Tensor, sight: Sight, group: str) -> tuple[Tensor, Tensor]:
    ranks = group_named(group)
    where = (ranks.rank(), ranks.size(), k.shape[1])
    coming = gathering(torch.stack((k, v)), ranks)
    if sight.own_first:
        total.add(own_block(*where, sight), k, v)
    whole = in_order(coming.wait())
    for block in blocks_of_all(*where, sight):
        total.add(block, *whole)
    return total.result()


def _backward(total: Backward, k: Tensor, v: Tensor, sight: Sight, group: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    ranks = group_named(group)
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

    (q [B, S, H, K], k and v [B, S, G, K], document lengths [B, M] or None, groups of positions [B, R S] or None,
    attention sinks [H] or None, scale, causal, window, the group's name) ->
    (output [B, S, H, K], log-sum-exp [B, H, S]). Only the output is differentiable.

    Dual: grad [B, S, H, K] -> dq [B, S, H, K], dk and dv [B, S, G, K], and the sinks' gradient [H]. Forward gathers k
    and v; backward sums dk and dv over the ranks and returns each rank its own part.
    """
    # torch reads an operator's schema from its annotated arguments, so both operators list them one by one.

    @torch.library.custom_op(f"mplug_cp::gathered_{parts.name}", mutates_args=())
    def forward(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        documents: Optional[Tensor],  # noqa: UP045 (torch reads it)
        groups: Optional[Tensor],  # noqa: UP045
        sinks: Optional[Tensor],  # noqa: UP045
        scale: float,
        causal: bool,
        window: Optional[int],  # noqa: UP045
        group: str,
    ) -> tuple[Tensor, Tensor]:
        sight = Sight(causal, window, groups is not None)
        return _forward(Forward(parts, q, Seen(sight, scale, documents, groups), sinks), k, v, sight, group)

    @torch.library.custom_op(f"mplug_cp::gathered_{parts.name}_backward", mutates_args=())
    def backward(
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        output: Tensor,
        sums: Tensor,
        documents: Optional[Tensor],  # noqa: UP045 (torch reads it)
        groups: Optional[Tensor],  # noqa: UP045
        sinks: Optional[Tensor],  # noqa: UP045
        scale: float,
        causal: bool,
        window: Optional[int],  # noqa: UP045
        group: str,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        sight = Sight(causal, window, groups is not None)
        seen = Seen(sight, scale, documents, groups)
        return _backward(Backward(parts, grad, q, output, sums, seen, sinks), k, v, sight, group)

    @forward.register_fake
    def _(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        b, s, h, _ = q.shape
        return q.new_empty(q.shape), q.new_empty((b, h, s), dtype=wide(q))

    @backward.register_fake
    def _(
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        output: Tensor,
        sums: Tensor,
        documents: Tensor | None,
        groups: Tensor | None,
        sinks: Tensor | None,
        *_: Any,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        of_sinks = q.new_empty(0) if sinks is None else sinks.new_empty(sinks.shape)
        return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), of_sinks

    def keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        q, k, v, *tensors = inputs[:6]
        ctx.rest = inputs[6:]
        ctx.save_for_backward(q, k, v, *output, *tensors)

    forward.register_autograd(differentiated(backward), setup_context=keep)
    return forward
