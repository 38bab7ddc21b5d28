"""Gradient buckets that are all-reduced while backward runs (PyTorch DDP, arXiv 2006.15704, section 3.2.3)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

import mplug_ops as ops
from mplug import GradientSink, Sinks


@dataclass
class Bucket:
    """A contiguous part of the gradient arena, which the ranks of `exchange.group` sum.

    `num_sinks` counts its sinks, and `num_missing` those that are not final yet in this step. `last` is the position,
    in the expected order of backward, of the sink that becomes final last.
    """

    gradients: Tensor
    exchange: ops.Exchange
    num_sinks: int
    num_missing: int
    last: int


class Queue:
    """All-reduces buckets in a fixed order, each once all its gradients are final.

    The order is that of `Bucket.last`, the same on all ranks. Replicas whose backward passes differ (an expert without
    tokens) complete buckets in different orders, but must sum the same buckets together. Also, all ranks of two groups
    must start the sums of both in the same order.
    """

    def __init__(self, sinks: Sinks, groups: Mapping[str, ops.Group], num_bytes: int) -> None:
        self.buckets: list[Bucket] = []
        self.under_way: list[Any] = []
        places = {name: place for place, name in enumerate(reversed(list(sinks)))}
        for held, gradients in sinks.stretches(num_bytes):
            group = groups.get(held[0].name)
            if group is None:
                continue
            items = (ops.Item(sink.name, tuple(sink.buffer.shape)) for sink in held)
            exchange = ops.Exchange("a bucket of gradients", group, items)
            bucket = Bucket(gradients, exchange, len(held), len(held), max(places[sink.name] for sink in held))
            self.buckets.append(bucket)
            for sink in held:
                sink.listeners.append(lambda sink, bucket=bucket: self._hear(sink, bucket))
        self.buckets.sort(key=lambda bucket: bucket.last)

    def _hear(self, sink: GradientSink, bucket: Bucket) -> None:
        bucket.num_missing -= 1
        for following in self.buckets[len(self.under_way) :]:
            if following.num_missing > 0:
                break
            following.exchange.check()
            group = following.exchange.group
            self.under_way.append(dist.all_reduce(following.gradients, group=group, async_op=True))

    def wait(self) -> None:
        """Wait (on a GPU, let the stream wait) for all sums, and reset the buckets for the next step."""
        for work, bucket in zip(self.under_way, self.buckets, strict=True):
            work.wait()
            bucket.num_missing = bucket.num_sinks
        self.under_way.clear()


def reduce_in_buckets(sinks: Sinks, groups: Mapping[str, ops.Group], num_bytes: int) -> list[Bucket]:
    """Sum every gradient over its parameter's group, in buckets of at least `num_bytes` bytes (the last may have less).

    A bucket holds neighbours in the gradient arena, which has about the order in which gradients become final. `groups`
    maps parameter names to groups; other parameters are skipped. Returns the buckets in the order of their sums.
    """
    queue = Queue(sinks, groups, num_bytes)
    sinks.when_finished.append(queue.wait)
    return queue.buckets
