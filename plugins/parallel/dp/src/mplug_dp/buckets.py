"""Buckets of gradients, all-reduced while backward still runs (PyTorch DDP, arXiv 2006.15704, section 3.2.3)."""

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

from mplug import GradientSink, Sinks, ops


@dataclass
class Bucket:
    """A stretch of the gradient arena: how many sinks it has, and how many of them are not final yet in this step."""

    gradients: Tensor
    num_sinks: int
    num_missing: int


class Queue:
    """Sums buckets over the replicas: each once all its gradients are final, and all in the order of the arena.

    Replicas whose backward passes differ (an expert without tokens) fill buckets in different orders, and must still
    pair the same ones.
    """

    def __init__(self, sinks: Sinks, group: ops.Group, num_bytes: int) -> None:
        self.group = group
        self.buckets: list[Bucket] = []
        self.under_way: list[Any] = []
        for held, gradients in sinks.stretches(num_bytes):
            bucket = Bucket(gradients, len(held), len(held))
            self.buckets.append(bucket)
            for sink in held:
                sink.listeners.append(lambda sink, bucket=bucket: self._hear(sink, bucket))

    def _hear(self, sink: GradientSink, bucket: Bucket) -> None:
        bucket.num_missing -= 1
        for following in self.buckets[len(self.under_way) :]:
            if following.num_missing > 0:
                break
            self.under_way.append(dist.all_reduce(following.gradients, group=self.group, async_op=True))

    def wait(self) -> None:
        """Wait (on a GPU, let the stream wait) for all sums, and expect the next step's."""
        for work, bucket in zip(self.under_way, self.buckets, strict=True):
            work.wait()
            bucket.num_missing = bucket.num_sinks
        self.under_way.clear()


def reduce_in_buckets(sinks: Sinks, group: ops.Group, num_bytes: int) -> list[Bucket]:
    """Sum every gradient over the replicas, in buckets of neighbours in the order in which backward ends them."""
    if group is None:
        return []
    queue = Queue(sinks, group, num_bytes)
    sinks.reduced_over.add("dp")
    sinks.when_finished.append(queue.wait)
    return queue.buckets
