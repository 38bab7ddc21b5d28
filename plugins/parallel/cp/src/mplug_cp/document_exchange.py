"""What a rank sends and computes, if samples are divided by documents: index tensors on its device, sizes on the CPU.

N positions of a rank in a micro batch of B samples, M documents of a sample.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from mplug_cp.blocks import Sight
from mplug_cp.needs import Gap, Needs, Rows, needs_of
from mplug_cp.operators import Call
from mplug_cp.rows import moved, rows_in, within
from mplug_nn.parts import Lengths, Places
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
    """What a rank computes and sends in a micro batch.

    `lengths` are those of the documents on this rank, [B, M]; if parts are computed by position, `places` are those of
    all samples, and lengths are [1, B M]. `sent` are the rows that other ranks need, for each rank in order.
    """

    lengths: Lengths
    places: Places | None
    parts: tuple[Part, ...]
    sent: Tensor
    counts_sent: tuple[int, ...]
    counts_received: tuple[int, ...]
    is_needed: bool
    """Whether any rank sends anything; all ranks agree."""

    def own(self, call: Call) -> dict[str, Any]:
        """What the call of the part of a rank's own keys receives beside its tensors."""
        return {"scale": call.scale, "causal": call.causal, "lengths": self.lengths, "places": self.places}

    def trade(self, x: Tensor, ranks: ProcessGroup) -> Transfer:
        """Send rows x [sent, ...] to the ranks that need them."""
        return trading(x, self.counts_sent, self.counts_received, ranks)

    def trade_back(self, x: Tensor, ranks: ProcessGroup) -> Transfer:
        """The dual: rows x [received, ...] return to the ranks that sent them."""
        return trading(x, self.counts_received, self.counts_sent, ranks)


def exchange_of(call: Call, equal_length: int, device: torch.device) -> Exchange:
    """The exchange of a call; the CPU waits for the device if the lengths of documents are on it."""
    assert call.documents is not None, "the site needs the lengths of documents"
    ranks = group_named(call.group)
    rows = tuple(map(tuple, call.documents.tolist()))
    return _exchange(rows, ranks.rank(), ranks.size(), equal_length, call.sight, device)


@lru_cache(maxsize=16)
def _exchange(rows: Rows, rank: int, size: int, equal_length: int, sight: Sight, device: torch.device) -> Exchange:
    """The exchange of a micro batch, for all layers with the same sight."""
    needs = needs_of(rows, size, equal_length, sight)
    own = needs[rank]
    received = [within(own.keys, of.held) for of in needs]
    sent = [within(of.keys, own.held) for of in needs]
    arriving = [part for parts in received for part in parts]
    lengths = moved(torch.tensor(own.lengths).view(1 if sight.by_position else len(rows), -1), device)
    return Exchange(
        (lengths, lengths),
        Places(own.held, own.held, sight.window) if sight.by_position else None,
        tuple(_part(gaps, own, arriving, sight, device) for gaps in own.parts),
        rows_in([part for parts in sent for part in parts], own.held, device),
        tuple(sum(map(len, parts)) for parts in sent),
        tuple(sum(map(len, parts)) for parts in received),
        any(of.keys for of in needs),
    )


def _part(gaps: Sequence[Gap], own: Needs, arriving: Sequence[range], sight: Sight, device: torch.device) -> Part:
    queries, keys = (tuple(part for gap in gaps for part in getattr(gap, name)) for name in ("queries", "keys"))
    counts = [[sum(map(len, getattr(gap, name))) for gap in gaps] for name in ("queries", "keys")]
    lengths = tuple(moved(torch.tensor([count]), device) for count in counts)
    places = Places(queries, keys, sight.window) if sight.by_position else None
    rows = rows_in(queries, own.held, device), rows_in(keys, arriving, device)
    return Part(*rows, (lengths[0], lengths[1]), places)
