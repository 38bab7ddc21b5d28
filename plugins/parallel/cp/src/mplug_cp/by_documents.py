"""Attention of samples that are divided by documents, as torch operators: only divided documents are exchanged.

B batch, S local length, N = B S positions of a rank, H query heads, G KV heads, K head dim, R ranks. `needs.py` states
which positions a rank needs.

    forward    own keys          every document on this rank, whole or not: a segment for each
               all-to-all        meanwhile: k and v of the positions that other ranks need
               gaps              queries behind a gap against its keys
    backward   all-to-all        again, because a rank saves only its own keys and values
               all-to-all (the dual)    dk and dv of received positions, to their own ranks, which sum them

The lengths of documents are on the CPU, where the sizes of messages come from: the CPU does not wait for the device.
"""

from collections.abc import Sequence
from functools import cache, partial

import torch
from torch import Tensor

from mplug_cp.document_exchange import Exchange, exchange_of
from mplug_cp.operators import Call, Operator, operator_of
from mplug_cp.totals import gradient_of_sinks, merge, weigh_with_sinks, wide
from mplug_nn.parts import AttentionParts
from mplug_ops.transfers import Transfer, group_named


def _flat(x: Tensor) -> Tensor:
    """[B, S, G, K] -> [1, N, G, K]."""
    return x.flatten(0, 1)[None]


def _flat_sums(sums: Tensor) -> Tensor:
    """[B, H, S] -> [1, H, N]."""
    return sums.transpose(0, 1).flatten(1)[None]


def _started(exchange: Exchange, k: Tensor, v: Tensor, call: Call) -> Transfer | None:
    """The keys and values [1, N, G, K] that other ranks need, in transfer: [received, 2, G, K]; or None."""
    if not exchange.is_needed:
        return None
    return exchange.trade(torch.stack([x[0, exchange.sent] for x in (k, v)], dim=1), group_named(call.group))


def _attend(
    equal_length: int, parts: AttentionParts, q: Tensor, k: Tensor, v: Tensor, call: Call
) -> tuple[Tensor, Tensor]:
    exchange, shape, dtype = exchange_of(call, equal_length, q.device), q.shape, q.dtype
    flat = _flat(q), _flat(k), _flat(v)
    coming = _started(exchange, *flat[1:], call)
    output, sums = parts.forward(*((q, k, v) if exchange.places is None else flat), **exchange.own(call))
    output, sums = _flat(output.to(wide(q))).contiguous(), _flat_sums(sums).clone()
    if coming is not None:
        received = coming.wait()
        for part in exchange.parts:
            keys, values = received[part.keys].unbind(1)
            more = parts.forward(flat[0][:, part.queries], keys[None], values[None], **part.call(call.scale))
            rows = output[:, part.queries], sums[:, :, part.queries]
            merge(*rows, *more)
            output[:, part.queries], sums[:, :, part.queries] = rows
    if call.sinks is not None:
        sums = weigh_with_sinks(output, sums, call.sinks)
    sums = sums[0].unflatten(1, shape[:2]).transpose(0, 1).contiguous()
    return output.to(dtype, copy=True).view(shape), sums


def _differentiate(
    equal_length: int,
    parts: AttentionParts,
    grad: Tensor,
    q: Tensor,
    keys: Sequence[Tensor],
    output: Tensor,
    sums: Tensor,
    call: Call,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    exchange, (k, v) = exchange_of(call, equal_length, q.device), keys
    tensors = (grad, q, k, v, output, sums)
    flat = (*map(_flat, tensors[:-1]), _flat_sums(sums))
    coming = _started(exchange, flat[2], flat[3], call)
    found = parts.backward(*(tensors if exchange.places is None else flat), **exchange.own(call))
    dq, dk, dv = (_flat(x.to(wide(q), copy=True)) for x in found)
    if coming is not None:
        of_received = _of_gaps(exchange, parts, flat, coming.wait(), dq, call)
        returned = exchange.trade_back(of_received, group_named(call.group)).wait()
        for rows, of_rank in zip(*(x.split(exchange.counts_sent) for x in (exchange.sent, returned)), strict=True):
            dk[0, rows] += of_rank[:, 0]  # distinct for each rank, so the sum has one order
            dv[0, rows] += of_rank[:, 1]
    of_heads = (total.to(x.dtype).view(x.shape) for total, x in ((dq, q), (dk, k), (dv, v)))
    return *of_heads, gradient_of_sinks(call.sinks, grad, output, sums)  # type: ignore[return-value]


def _of_gaps(
    exchange: Exchange, parts: AttentionParts, flat: Sequence[Tensor], received: Tensor, dq: Tensor, call: Call
) -> Tensor:
    """The gradients [received, 2, G, K] of received keys and values; those of their queries are added to dq."""
    grad, q, _, _, output, sums = flat
    found = torch.zeros(received.shape, dtype=wide(received), device=received.device)
    for part in exchange.parts:
        rows, (keys, values) = part.queries, received[part.keys].unbind(1)
        of_queries, *of_keys = parts.backward(
            grad[:, rows],
            q[:, rows],
            keys[None],
            values[None],
            output[:, rows],
            sums[:, :, rows],
            **part.call(call.scale),
        )
        dq[:, rows] += of_queries  # the rows of a part are distinct, and so are its keys
        found[part.keys] = torch.stack([x[0] for x in of_keys], dim=1).to(found.dtype)
    return found


@cache
def by_documents(equal_length: int, parts: AttentionParts) -> Operator:
    """The operator of attention of samples that are divided by documents; one operator per `parts` and length.

    Dual: grad [B, S, H, K] -> dq [B, S, H, K], dk and dv [B, S, G, K], and the sinks' gradient [H].
    """
    attend, differentiate = (partial(one, equal_length) for one in (_attend, _differentiate))
    return operator_of(f"documents_{equal_length}_{parts.name}", parts, attend, differentiate)
