"""Buckets of gradients, all-reduced while backward still runs (PyTorch DDP, arXiv 2006.15704, section 3.2.3)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

from mplug import GradientSink, Sinks, ops


@dataclass
class Bucket:
    """A stretch of the gradient arena and the ranks that sum it.

    `num_sinks` says how many sinks it has, `num_missing` how many of them are not final yet in this step, and `last`
    which is expected to be the last, counted from where backward begins.
    """

    gradients: Tensor
    group: ops.Group
    num_sinks: int
    num_missing: int
    last: int


class Queue:
    """Sums buckets over their ranks: each once all its gradients are final, and all in one order, that of their ends.

    Replicas whose backward passes differ (an expert without tokens) fill buckets in different orders, and must still
    pair the same ones; and ranks that are in two groups must begin the sums of both in the same order.
    """

    def __init__(self, sinks: Sinks, groups: Mapping[str, ops.Group], num_bytes: int) -> None:
        self.buckets: list[Bucket] = []
        self.under_way: list[Any] = []
        places = {name: place for place, name in enumerate(reversed(list(sinks)))}
        for held, gradients in sinks.stretches(num_bytes):
            group = groups.get(held[0].name)
            if group is None:
                continue
            bucket = Bucket(gradients, group, len(held), len(held), max(places[sink.name] for sink in held))
            self.buckets.append(bucket)
            for sink in held:
                sink.listeners.append(lambda sink, bucket=bucket: self._hear(sink, bucket))
        self.buckets.sort(key=lambda bucket: bucket.last)

    def _hear(self, sink: GradientSink, bucket: Bucket) -> None:
        bucket.num_missing -= 1
        for following in self.buckets[len(self.under_way) :]:
            if following.num_missing > 0:
                break
            self.under_way.append(dist.all_reduce(following.gradients, group=following.group, async_op=True))

    def wait(self) -> None:
        """Wait (on a GPU, let the stream wait) for all sums, and expect the next step's."""
        for work, bucket in zip(self.under_way, self.buckets, strict=True):
            work.wait()
            bucket.num_missing = bucket.num_sinks
        self.under_way.clear()


def reduce_in_buckets(sinks: Sinks, groups: Mapping[str, ops.Group], num_bytes: int) -> list[Bucket]:
    """Sum every gradient over its parameter's group, in buckets of neighbours in the order in which backward ends them.

    `groups` are by the parameters' names; who has none is left out. Returns the buckets in the order of their sums.
    """
    queue = Queue(sinks, groups, num_bytes)
    sinks.when_finished.append(queue.wait)
    return queue.buckets
