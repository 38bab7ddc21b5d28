"""Buckets of gradients, all-reduced while backward still runs (PyTorch DDP, arXiv 2006.15704, section 3.2.3)."""

from typing import Any

import torch.distributed as dist
from torch import Tensor

from mplug import GradientSink, Sinks, ops


class Buckets:
    """Stretches of the gradient arena, each summed over the replicas once all its gradients are final.

    Sums begin in the order of the arena, whatever the order in which buckets fill: replicas whose backward passes
    differ (an expert without tokens) must still pair the same buckets.
    """

    def __init__(self, sinks: Sinks, group: ops.Group, num_bytes: int) -> None:
        self.group = group
        self.gradients: list[Tensor] = []
        self.sizes: list[int] = []
        for number, (held, gradients) in enumerate(sinks.stretches(num_bytes)):
            self.gradients.append(gradients)
            self.sizes.append(len(held))
            for sink in held:
                sink.listeners.append(lambda _, number=number: self._hear(number))
        self.missing = list(self.sizes)
        self.under_way: list[Any] = []

    def _hear(self, number: int) -> None:
        self.missing[number] -= 1
        while len(self.under_way) < len(self.missing) and self.missing[len(self.under_way)] == 0:
            gradients = self.gradients[len(self.under_way)]
            self.under_way.append(dist.all_reduce(gradients, group=self.group, async_op=True))

    def wait(self) -> None:
        """Wait (on a GPU, let the stream wait) for all sums."""
        for work in self.under_way:
            work.wait()
        self.under_way.clear()
        self.missing = list(self.sizes)


def reduce_in_buckets(sinks: Sinks, group: ops.Group, num_bytes: int) -> None:
    """Sum every gradient over the replicas, in buckets of neighbours in the order in which backward ends them."""
    if group is None:
        return
    buckets = Buckets(sinks, group, num_bytes)
    sinks.reduced_over.add("dp")
    sinks.when_finished.append(buckets.wait)
