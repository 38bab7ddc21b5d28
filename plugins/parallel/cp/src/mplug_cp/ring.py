"""Ring attention (arXiv 2310.01889), as torch operators: attention overlaps the transfer of keys and values.

B batch, S local length, H query heads, G KV heads, K head dim, R ranks. At step s, rank r has the keys and values of
rank r - s (modulo R). It computes with them while those of the next step arrive. Forward saves the keys and values of
its last step. Backward visits the steps in reverse order, so it starts without waiting. The keys and values return to
their own rank. Their gradients follow one step behind, and every rank adds its share to them.

    forward    s = 0 ... R-1    KV: r -> r+1
    backward   s = R-1 ... 0    KV: r -> r-1      dKV, including this rank's share: r -> r-1

With windows, no rank sees anything at most of the steps. They are left out: keys and values travel past them at once.
"""

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from mplug_cp.blocks import ring_blocks, steps_of
from mplug_cp.operators import Call, Operator, operator_of
from mplug_cp.totals import Backward, Forward, add_to, wide
from mplug_nn.parts import AttentionParts
from mplug_ops.transfers import Transfer, group_named, shift


def _attend(parts: AttentionParts, q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor, Tensor]:
    total, ring, sight = Forward(parts, q, call.seen, call.sinks), group_named(call.group), call.sight
    where = (ring.rank(), ring.size(), k.shape[1])
    steps = steps_of(*where[1:], sight)
    kv = torch.stack((k, v))  # [2, B, S, G, K]: one message
    for step, following in zip(steps, (*steps[1:], None), strict=True):
        coming = None if following is None else shift(kv, ring, by=following - step)
        for block in ring_blocks(step, *where, sight):
            total.add(block, *kv)
        kv = coming.wait() if coming else kv
    return *total.result(), kv


def _differentiate(
    parts: AttentionParts, grad: Tensor, q: Tensor, keys: Sequence[Tensor], output: Tensor, sums: Tensor, call: Call
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    total, sight = Backward(parts, grad, q, output, sums, call.seen, call.sinks), call.sight
    (kv,), ring = keys, group_named(call.group)
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

    It keeps the keys and values of the last step. Dual: grad [B, S, H, K] -> dq [B, S, H, K], dk and dv [B, S, G, K],
    and the sinks' gradient [H]. Forward shifts k and v by +1 rank per step; backward shifts them, and their gradients,
    by -1.
    """
    return operator_of(f"ring_{parts.name}", parts, _attend, _differentiate, keeps=1)
