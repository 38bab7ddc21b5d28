"""Ring attention (arXiv 2310.01889), as torch operators: attention overlaps the transfer of keys and values.

B batch, S local length, H query heads, G KV heads, K head dim, R ranks. At step s, rank r has the keys and values of
rank r - s (modulo R). It computes with them while those of the next step arrive. Forward saves the keys and values of
its last step. Backward visits the steps in reverse order, so it starts without waiting. The keys and values return to
their own rank. Their gradients follow one step behind, and every rank adds its share to them.

    forward    s = 0 ... R-1    KV: r -> r+1
    backward   s = R-1 ... 0    KV: r -> r-1      dKV, including this rank's share: r -> r-1

With windows, no rank sees anything at most of the steps. They are left out: keys and values travel past them at once.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, Optional

import torch
from torch import Tensor

from mplug_cp.blocks import Sight, ring_blocks, steps_of
from mplug_cp.totals import Backward, Forward, Seen, add_to, differentiated, wide
from mplug_nn.parts import AttentionParts
from mplug_ops.transfers import Transfer, group_named, shift

Operator = Callable[..., tuple[Tensor, Tensor, Tensor]]


def _forward(total: Forward, k: Tensor, v: Tensor, sight: Sight, group: str) -> tuple[Tensor, Tensor, Tensor]:
    ring = group_named(group)
    where = (ring.rank(), ring.size(), k.shape[1])
    steps = steps_of(*where[1:], sight)
    kv = torch.stack((k, v))  # [2, B, S, G, K]: one message
    for step, following in zip(steps, (*steps[1:], None), strict=True):
        coming = None if following is None else shift(kv, ring, by=following - step)
        for block in ring_blocks(step, *where, sight):
            total.add(block, *kv)
        kv = coming.wait() if coming else kv
    return *total.result(), kv


def _backward(total: Backward, kv: Tensor, sight: Sight, group: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    ring = group_named(group)
    where = (ring.rank(), ring.size(), kv.shape[2])
    steps = steps_of(*where[1:], sight)[::-1]
    travelling: Transfer | None = None
    for step, following in zip(steps, (*steps[1:], None), strict=True):
        coming = None if following is None else shift(kv, ring, by=following - step)
        shares = [(block, total.of(block, *kv)) for block in ring_blocks(step, *where, sight)]
        dkv = travelling.wait() if travelling else torch.zeros(kv.shape, dtype=wide(kv), device=kv.device)
        for block, gradients in shares:
            add_to(dkv, block, gradients)
        travelling = None if following is None else shift(dkv, ring, by=following - step)
        kv = coming.wait() if coming else kv
    dq, of_sinks = total.result()
    dk, dv = (x.to(kv.dtype, copy=True) for x in dkv)
    return dq, dk, dv, of_sinks


@cache
def ring_of(parts: AttentionParts) -> Operator:
    """The operator of ring attention, built from a supplier's parts; one operator per `parts`.

    (q [B, S, H, K], k and v [B, S, G, K], document lengths [B, M] or None, groups of positions [B, R S] or None,
    attention sinks [H] or None, scale, causal, window, the group's name) ->
    (output [B, S, H, K], log-sum-exp [B, H, S], the keys and values of the last step [2, B, S, G, K]). Only the output
    is differentiable.

    Dual: grad [B, S, H, K] -> dq [B, S, H, K], dk and dv [B, S, G, K], and the sinks' gradient [H]. Forward shifts k
    and v by +1 rank per step; backward shifts them, and their gradients, by -1.
    """
    # torch reads an operator's schema from its annotated arguments, so both operators list them one by one.

    @torch.library.custom_op(f"mplug_cp::ring_{parts.name}", mutates_args=())
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
    ) -> tuple[Tensor, Tensor, Tensor]:
        sight = Sight(causal, window, groups is not None)
        return _forward(Forward(parts, q, Seen(sight, scale, documents, groups), sinks), k, v, sight, group)

    @torch.library.custom_op(f"mplug_cp::ring_{parts.name}_backward", mutates_args=())
    def backward(
        grad: Tensor,
        q: Tensor,
        kv: Tensor,
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
        return _backward(Backward(parts, grad, q, output, sums, seen, sinks), kv, sight, group)

    @forward.register_fake
    def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
        b, s, h, _ = q.shape
        return q.new_empty(q.shape), q.new_empty((b, h, s), dtype=wide(q)), k.new_empty((2, *k.shape))

    @backward.register_fake
    def _(
        grad: Tensor,
        q: Tensor,
        kv: Tensor,
        output: Tensor,
        sums: Tensor,
        documents: Tensor | None,
        groups: Tensor | None,
        sinks: Tensor | None,
        *_: Any,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        of_sinks = q.new_empty(0) if sinks is None else sinks.new_empty(sinks.shape)
        return q.new_empty(q.shape), kv.new_empty(kv.shape[1:]), kv.new_empty(kv.shape[1:]), of_sinks

    def keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        q, _, _, documents, groups, sinks, *ctx.rest = inputs
        mixed, sums, kv = output
        ctx.save_for_backward(q, kv, mixed, sums, documents, groups, sinks)

    forward.register_autograd(differentiated(backward), setup_context=keep)
    return forward
