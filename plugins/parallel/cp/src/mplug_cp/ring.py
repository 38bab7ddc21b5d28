"""Ring attention (arXiv 2310.01889), as torch operators: attention overlaps the transfer of keys and values.

B batch, S local length, H query heads, G KV heads, K head dim, R ranks. At step s, rank r has the keys and values of
rank r - s (modulo R). It computes with them while those of the next step arrive. Forward saves the keys and values of
its last step. Backward visits the steps in reverse order, so it starts without waiting. The keys and values return to
their own rank. Their gradients follow one step behind, and every rank adds its share to them.

    forward    s = 0 ... R-1    KV: r -> r+1
    backward   s = R-1 ... 0    KV: r -> r-1      dKV, including this rank's share: r -> r-1
"""

from collections.abc import Callable
from functools import cache
from typing import Any, Optional

import torch
from torch import Tensor

from mplug.ops.transfers import Transfer, group_named, shift
from mplug_cp.blocks import ring_block
from mplug_cp.totals import Backward, Forward, add_to, wide
from mplug_nn.parts import AttentionParts

Operator = Callable[..., tuple[Tensor, Tensor, Tensor]]


def _forward(total: Forward, k: Tensor, v: Tensor, causal: bool, group: str) -> tuple[Tensor, Tensor, Tensor]:
    ring = group_named(group)
    kv = torch.stack((k, v))  # [2, B, S, G, K]: one message
    for step in range(ring.size()):
        coming = shift(kv, ring, by=1) if step + 1 < ring.size() else None
        total.add(ring_block(step, ring.rank(), ring.size(), k.shape[1], causal), *kv)
        kv = coming.wait() if coming else kv
    return *total.result(), kv


def _backward(total: Backward, kv: Tensor, causal: bool, group: str) -> tuple[Tensor, Tensor, Tensor]:
    ring = group_named(group)
    following: Transfer | None = None
    for step in reversed(range(ring.size())):
        coming = shift(kv, ring, by=-1) if step else None
        block = ring_block(step, ring.rank(), ring.size(), kv.shape[2], causal)
        gradients = total.of(block, *kv)
        dkv = following.wait() if following else torch.zeros(kv.shape, dtype=wide(kv), device=kv.device)
        add_to(dkv, block, gradients)
        following = shift(dkv, ring, by=-1) if step else None
        kv = coming.wait() if coming else kv
    dk, dv = (x.to(kv.dtype, copy=True) for x in dkv)
    return total.result(), dk, dv


@cache
def ring_of(parts: AttentionParts) -> Operator:
    """The operator of ring attention, built from a supplier's parts; one operator per `parts`.

    (q [B, S, H, K], k and v [B, S, G, K], document lengths [B, M] or None, scale, causal, the group's name) ->
    (output [B, S, H, K], log-sum-exp [B, H, S], the keys and values of the last step [2, B, S, G, K]). Only the output
    is differentiable.

    Dual: grad [B, S, H, K] -> dq [B, S, H, K], dk and dv [B, S, G, K]. Forward shifts k and v by +1 rank per step;
    backward shifts them, and their gradients, by -1.
    """
    # torch reads an operator's schema from its annotated arguments, so both operators list them one by one.

    @torch.library.custom_op(f"mplug_cp::ring_{parts.name}", mutates_args=())
    def forward(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        documents: Optional[Tensor],  # noqa: UP045 (torch reads it)
        scale: float,
        causal: bool,
        group: str,
    ) -> tuple[Tensor, Tensor, Tensor]:
        return _forward(Forward(parts, q, documents, scale), k, v, causal, group)

    @torch.library.custom_op(f"mplug_cp::ring_{parts.name}_backward", mutates_args=())
    def backward(
        grad: Tensor,
        q: Tensor,
        kv: Tensor,
        output: Tensor,
        sums: Tensor,
        documents: Optional[Tensor],  # noqa: UP045 (torch reads it)
        scale: float,
        causal: bool,
        group: str,
    ) -> tuple[Tensor, Tensor, Tensor]:
        return _backward(Backward(parts, grad, q, output, sums, documents, scale), kv, causal, group)

    @forward.register_fake
    def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
        b, s, h, _ = q.shape
        return q.new_empty(q.shape), q.new_empty((b, h, s), dtype=wide(q)), k.new_empty((2, *k.shape))

    @backward.register_fake
    def _(grad: Tensor, q: Tensor, kv: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
        return q.new_empty(q.shape), kv.new_empty(kv.shape[1:]), kv.new_empty(kv.shape[1:])

    def keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        q, _, _, documents, *ctx.rest = inputs
        mixed, sums, kv = output
        ctx.save_for_backward(q, kv, mixed, sums, documents)

    def differentiate(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        return *backward(grad, *ctx.saved_tensors, *ctx.rest), None, None, None, None

    forward.register_autograd(differentiate, setup_context=keep)
    return forward
