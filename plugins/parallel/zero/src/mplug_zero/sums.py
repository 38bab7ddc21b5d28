"""Asynchronous sums of a bucket's gradients: over the ranks that own its parts, then over those with copies of them.

On a GPU, a sum runs on a stream of its own. On a CPU, `begin` starts the first collective and `end` runs the rest.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

import mplug_ops as ops
from mplug import GradientSink
from mplug_ops.transfers import summing_all, summing_parts
from mplug_sharding import Shard
from mplug_zero.groups import Pair, exchange_of


@dataclass
class Lane:
    """The state of a bucket in a step: its memory, its groups and its sinks.

    `num_missing` counts the sinks that it still waits for, `num_sums` the sums begun in this step.
    """

    shard: Shard
    groups: Pair
    sinks: list[GradientSink]
    num_missing: int = 0
    num_sums: int = 0
    exchanges: list[ops.Exchange] = field(default_factory=list)
    """Those of the sum over the owners and of the sum over the ranks with copies."""

    def __post_init__(self) -> None:
        bucket = self.shard.bucket
        part = ops.Item(str(bucket.names), (bucket.num_owned,), (self.shard.owned.start,))
        self.exchanges = [
            exchange_of("gradients onto their owners", self.shard, self.groups.owners),
            ops.Exchange("gradients that ranks own", self.groups.copies, [part]),
        ]
        self.num_missing = len(self.sinks)


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
            for work in journey:
                work.wait()
            self._under_way.append((lane, self._stream.record_event()))

    def end(self, but: int = 0) -> None:
        """Wait (on a GPU, let the stream wait) for all sums except the newest `but`; release transient buckets."""
        while len(self._under_way) > but:
            lane, rest = self._under_way.popleft()
            if self._stream is None:
                work, journey = rest
                work.wait()
                for work in journey:
                    work.wait()
            else:
                torch.cuda.current_stream().wait_event(rest)
            if lane.shard.transient:
                lane.shard.release()


def _journey(lane: Lane, dtype: torch.dtype, last: bool) -> Iterator[Any]:
    """Sum a bucket step by step: each `yield` returns a collective to wait for before the generator is resumed.

    First it reduce-scatters the bucket onto its owners. The result is copied to the owned gradients; a transient bucket
    adds it, except for the first sum of a step. For the last sum of a step, it then all-reduces the owned gradients
    over the ranks with copies.
    """
    shard, group = lane.shard, lane.groups.owners
    assert group is not None
    lane.exchanges[0].check()
    flat = shard.gradients.to(dtype)  # no copy if it has that dtype
    yield summing_parts(flat, group)
    own, arrived = shard.owned_gradients, flat[shard.owned]
    if own.data_ptr() != arrived.data_ptr():
        _ = own.copy_(arrived) if lane.num_sums == 1 or not shard.transient else own.add_(arrived)
    if last and lane.groups.copies is not None:
        lane.exchanges[1].check()
        total = own.to(dtype)
        yield summing_all(total, lane.groups.copies)
        if total is not own:
            own.copy_(total)
