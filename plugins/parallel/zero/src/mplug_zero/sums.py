"""Asynchronous sums of a bucket's gradients: over the ranks that own its parts, then over those with copies of them.

On a GPU, a sum runs on a stream of its own. On a CPU, `begin` starts the first collective and `end` runs the rest.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mplug import GradientSink, Shard, ops
from mplug.ops.transfers import summing_all, summing_onto, summing_parts
from mplug_zero.groups import Pair, exchange_of


@dataclass
class Lane:
    """The state of a bucket in a step: its memory, its groups and its sinks.

    `num_missing` counts the sinks that it still waits for, `num_sums` the sums begun in this step. `owned` are this
    rank's gradients.
    """

    shard: Shard
    groups: Pair
    sinks: list[GradientSink]
    num_missing: int = 0
    num_sums: int = 0
    owned: list[Tensor] = field(default_factory=list)
    exchanges: list[ops.Exchange] = field(default_factory=list)
    """Those of the sum over the owners and of the sum over the ranks with copies."""

    def __post_init__(self) -> None:
        parts = [ops.Item(str(self.shard.bucket.names), (one.length,), (one.start,)) for one, _ in self.shard.owned]
        self.exchanges = [
            exchange_of("gradients onto their owners", self.shard, self.groups.owners),
            ops.Exchange("gradients that ranks own", self.groups.copies, parts),
        ]
        self.num_missing = len(self.sinks)
        self.owned = [self.shard.owned_gradient(stretch, at) for stretch, at in self.shard.owned]


class Sums:
    """The sums in flight, started and finished in the same order on all ranks."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype = dtype
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._under_way: deque[tuple[Lane, Any]] = deque()

    def __contains__(self, lane: Lane) -> bool:
        return any(one is lane for one, _ in self._under_way)

    def begin(self, lane: Lane, last: bool) -> None:
        """Start the sum of a bucket over its owners; the `last` sum of a step also sums over the ranks with copies."""
        journey = _journey(lane, self.dtype, last)
        lane.num_sums += 1
        if self._stream is None:
            self._under_way.append((lane, (next(journey), journey)))
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for works in journey:
                _wait(works)
            self._under_way.append((lane, self._stream.record_event()))

    def end(self, but: int = 0) -> None:
        """Wait (on a GPU, let the stream wait) for all sums except the newest `but`; release transient buckets."""
        while len(self._under_way) > but:
            lane, rest = self._under_way.popleft()
            if self._stream is None:
                works, journey = rest
                _wait(works)
                for works in journey:
                    _wait(works)
            else:
                torch.cuda.current_stream().wait_event(rest)
            if lane.shard.transient:
                lane.shard.release()


def _wait(works: list[Any]) -> None:
    for work in works:
        work.wait()


def _journey(lane: Lane, dtype: torch.dtype, last: bool) -> Iterator[list[Any]]:
    """Sum a bucket step by step: each `yield` returns collectives to wait for before the generator is resumed.

    First it reduces the bucket onto its owners: one reduce-scatter of equal parts, or one reduce per stretch. The
    result is copied to the owned gradients; a transient bucket adds it, except for the first sum of a step. For the
    last sum of a step, it then all-reduces the owned gradients over the ranks with copies.
    """
    shard, group = lane.shard, lane.groups.owners
    assert group is not None
    lane.exchanges[0].check()
    flat = shard.gradients.to(dtype)  # no copy if it has that dtype
    if shard.bucket.is_even(group.size()):
        yield [summing_parts(flat, group)]
    else:
        yield [summing_onto(flat[one.start : one.stop], group, one.owner) for one in shard.bucket.stretches]
    for own, (stretch, _) in zip(lane.owned, shard.owned, strict=True):
        arrived = flat[stretch.start : stretch.stop]
        if own.data_ptr() != arrived.data_ptr():
            _ = own.copy_(arrived) if lane.num_sums == 1 or not shard.transient else own.add_(arrived)
    if last and lane.groups.copies is not None:
        lane.exchanges[1].check()
        totals = [own.to(dtype) for own in lane.owned]
        yield [summing_all(total, lane.groups.copies) for total in totals]
        for own, total in zip(lane.owned, totals, strict=True):
            if total is not own:
                own.copy_(total)
