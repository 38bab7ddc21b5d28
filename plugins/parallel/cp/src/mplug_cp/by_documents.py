"""Attention of samples that are divided by documents, as torch operators: only divided documents are exchanged.

B batch, S local length, N = B S positions of a rank, H query heads, G KV heads, K head dim, R ranks. `needs.py` states
which positions a rank needs.

    forward    own keys          every document on this rank, whole or not: [1, N, H, K], a segment for each
               all-to-all        meanwhile: k and v of the positions that other ranks need
               gaps              queries behind a gap against its keys
    backward   all-to-all        again, because a rank saves only its own keys and values
               all-to-all (the dual)    dk and dv of received positions, to their own ranks, which sum them

The lengths of documents are on the CPU, where the sizes of messages come from: the CPU does not wait for the device.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from mplug import Ranges
from mplug_cp.blocks import Sight
from mplug_cp.needs import Gap, Needs, Rows, needs_of
from mplug_cp.operators import Call, Operator, operator_of
from mplug_cp.totals import gradient_of_sinks, merge, weigh_with_sinks, wide
from mplug_nn.parts import AttentionParts, Lengths, Places
from mplug_ops.transfers import Transfer, group_named, trading


@dataclass(frozen=True)
class Part:
    """A part of attention: rows of queries among those of the rank, rows of keys among the received ones."""

    queries: Tensor
    keys: Tensor
    lengths: Lengths
    places: Places | None

    def call(self, scale: float) -> dict[str, Any]:
        """What a call of the part receives beside its tensors: all keys of a causal site precede the queries."""
        return {"scale": scale, "causal": False, "lengths": self.lengths, "places": self.places}


@dataclass(frozen=True)
class Exchange:
    """What a rank computes and sends in a micro batch: index tensors on the device, and sizes of messages by rank."""

    lengths: Lengths
    places: Places | None
    parts: tuple[Part, ...]
    sent: Tensor
    counts_sent: tuple[int, ...]
    counts_received: tuple[int, ...]
    is_needed: bool
    """Whether any rank sends anything; all ranks agree."""

    def trade(self, x: Tensor, ranks: ProcessGroup) -> Transfer:
        """Send rows x [sent, ...] to the ranks that need them."""
        return trading(x, self.counts_sent, self.counts_received, ranks)

    def trade_back(self, x: Tensor, ranks: ProcessGroup) -> Transfer:
        """The dual: rows x [received, ...] return to the ranks that sent them."""
        return trading(x, self.counts_received, self.counts_sent, ranks)


def _exchange_of(call: Call, equal_length: int, device: torch.device) -> Exchange:
    assert call.documents is not None, "the site needs the lengths of documents"
    ranks = group_named(call.group)
    rows = tuple(map(tuple, call.documents.tolist()))
    return _exchange(rows, ranks.rank(), ranks.size(), equal_length, call.sight, device)


@lru_cache(maxsize=16)
def _exchange(rows: Rows, rank: int, size: int, equal_length: int, sight: Sight, device: torch.device) -> Exchange:
    """The exchange of a micro batch, for all layers with the same sight."""
    needs = needs_of(rows, size, equal_length, sight)
    own = needs[rank]
    received = [_within(own.keys, of.held) for of in needs]
    sent = [_within(of.keys, own.held) for of in needs]
    arriving = [part for parts in received for part in parts]
    lengths = _moved(torch.tensor([own.lengths]), device)
    return Exchange(
        (lengths, lengths),
        Places(own.held, own.held, sight.window) if sight.by_position else None,
        tuple(_part(gaps, own, arriving, sight, device) for gaps in own.parts),
        _rows_in([part for parts in sent for part in parts], own.held, device),
        tuple(sum(map(len, parts)) for parts in sent),
        tuple(sum(map(len, parts)) for parts in received),
        any(of.keys for of in needs),
    )


def _part(gaps: Sequence[Gap], own: Needs, arriving: Sequence[range], sight: Sight, device: torch.device) -> Part:
    queries, keys = (tuple(part for gap in gaps for part in getattr(gap, name)) for name in ("queries", "keys"))
    counts = [[sum(map(len, getattr(gap, name))) for gap in gaps] for name in ("queries", "keys")]
    lengths = tuple(_moved(torch.tensor([count]), device) for count in counts)
    places = Places(queries, keys, sight.window) if sight.by_position else None
    rows = _rows_in(queries, own.held, device), _rows_in(keys, arriving, device)
    return Part(*rows, (lengths[0], lengths[1]), places)


def _within(wanted: Sequence[range], held: Ranges) -> list[range]:
    """The positions that are in both, in order; both are in order."""
    found, first = [], 0
    for part in wanted:
        while first < len(held) and held[first].stop <= part.start:
            first += 1
        for other in held[first:]:
            if other.start >= part.stop:
                break
            found.append(range(max(part.start, other.start), min(part.stop, other.stop)))
    return found


def _rows_in(wanted: Sequence[range], held: Sequence[range], device: torch.device) -> Tensor:
    """The row of each wanted position in a tensor whose rows are the positions of `held`, in this order."""
    positions, rows = (torch.cat([torch.empty(0, dtype=torch.int64), *map(_counted, of)]) for of in (wanted, held))
    order = rows.argsort()
    return _moved(order[torch.searchsorted(rows[order], positions)], device)


def _counted(part: range) -> Tensor:
    return torch.arange(part.start, part.stop)


def _moved(x: Tensor, device: torch.device) -> Tensor:
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)


def _flat(x: Tensor) -> Tensor:
    """[B, S, G, K] -> [1, N, G, K]."""
    return x.flatten(0, 1)[None]


def _message(k: Tensor, v: Tensor, exchange: Exchange) -> Tensor:
    """The keys and values [1, N, G, K] that other ranks need: [sent, 2, G, K]."""
    return torch.stack([x[0, exchange.sent] for x in (k, v)], dim=1)


def _attend(
    equal_length: int, parts: AttentionParts, q: Tensor, k: Tensor, v: Tensor, call: Call
) -> tuple[Tensor, Tensor]:
    exchange, samples, dtype = _exchange_of(call, equal_length, q.device), len(q), q.dtype
    q, k, v = _flat(q), _flat(k), _flat(v)
    coming = exchange.trade(_message(k, v, exchange), group_named(call.group)) if exchange.is_needed else None
    own = {"scale": call.scale, "causal": call.causal, "lengths": exchange.lengths, "places": exchange.places}
    output, sums = parts.forward(q, k, v, **own)
    output, sums = output.to(wide(q)).contiguous(), sums.clone()
    received = coming.wait() if coming else k.new_empty(0)
    for part in exchange.parts:
        keys, values = received[part.keys].unbind(1)
        more = parts.forward(q[:, part.queries], keys[None], values[None], **part.call(call.scale))
        rows = output[:, part.queries], sums[:, :, part.queries]
        merge(*rows, *more)
        output[:, part.queries], sums[:, :, part.queries] = rows
    if call.sinks is not None:
        sums = weigh_with_sinks(output, sums, call.sinks)
    sums = sums[0].unflatten(1, (samples, -1)).transpose(0, 1).contiguous()
    return output[0].to(dtype, copy=True).unflatten(0, (samples, -1)), sums


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
    exchange, samples, ranks = _exchange_of(call, equal_length, q.device), len(q), group_named(call.group)
    of_sinks = gradient_of_sinks(call.sinks, grad, output, sums)
    grad, q, k, v, output = (_flat(x) for x in (grad, q, *keys, output))
    sums = sums.transpose(0, 1).flatten(1)[None]  # [1, H, N]
    coming = exchange.trade(_message(k, v, exchange), ranks) if exchange.is_needed else None
    own = {"scale": call.scale, "causal": call.causal, "lengths": exchange.lengths, "places": exchange.places}
    dq, dk, dv = (x.to(wide(q), copy=True) for x in parts.backward(grad, q, k, v, output, sums, **own))
    if coming is not None:
        received = coming.wait()
        of_received = torch.zeros(received.shape, dtype=wide(k), device=k.device)
        for part in exchange.parts:
            (others, values), rows = received[part.keys].unbind(1), part.queries
            of_queries, of_keys, of_values = parts.backward(
                grad[:, rows],
                q[:, rows],
                others[None],
                values[None],
                output[:, rows],
                sums[:, :, rows],
                **part.call(call.scale),
            )
            dq[:, rows] += of_queries  # rows of a part are distinct
            of_received[part.keys] = torch.stack((of_keys[0], of_values[0]), dim=1).to(of_received.dtype)
        returned = exchange.trade_back(of_received, ranks).wait()
        for rows, of_rank in zip(*(x.split(exchange.counts_sent) for x in (exchange.sent, returned)), strict=True):
            dk[0, rows] += of_rank[:, 0]  # distinct for each rank, so the sum has one order
            dv[0, rows] += of_rank[:, 1]
    dq, dk, dv = (x[0].unflatten(0, (samples, -1)).to(q.dtype) for x in (dq, dk, dv))
    return dq, dk, dv, of_sinks


@cache
def by_documents(equal_length: int, parts: AttentionParts) -> Operator:
    """The operator of attention of samples that are divided by documents; one operator per `parts` and length.

    Dual: grad [B, S, H, K] -> dq [B, S, H, K], dk and dv [B, S, G, K], and the sinks' gradient [H].
    """
    attend, differentiate = (partial(one, equal_length) for one in (_attend, _differentiate))
    return operator_of(f"documents_{equal_length}_{parts.name}", parts, attend, differentiate)
