"""Buckets of gradients, all-reduced while backward still runs (PyTorch DDP, arXiv 2006.15704, section 3.2.3)."""

from typing import Any

import torch.distributed as dist
from torch import Tensor

from mplug import GradientSink, Sinks, ops


class Bucket:
    """A stretch of the gradient arena. Its sum over the replicas begins when the last of its gradients is final."""

    def __init__(self, sinks: list[GradientSink], gradients: Tensor, group: ops.Group) -> None:
        self.gradients, self.group, self.size = gradients, group, len(sinks)
        self.num_final = 0
        self.work: Any = None
        for sink in sinks:
            sink.listeners.append(self._hear)

    def _hear(self, sink: GradientSink) -> None:
        self.num_final += 1
        if self.num_final == self.size:
            self.num_final = 0
            self.work = dist.all_reduce(self.gradients, group=self.group, async_op=True)

    def wait(self) -> None:
        """Wait (on a GPU, let the stream wait) for the sum."""
        self.work.wait()


def reduce_in_buckets(sinks: Sinks, group: ops.Group, bucket_bytes: int) -> list[Bucket]:
    """Sum every gradient over the replicas, in buckets of neighbours in the order in which backward ends them."""
    if group is None:
        return []
    buckets = [Bucket(held, gradients, group) for held, gradients in sinks.stretches(bucket_bytes)]
    sinks.reduced_over.add("dp")
    sinks.when_finished += [bucket.wait for bucket in buckets]
    return buckets
