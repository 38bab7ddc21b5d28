"""The sum of a gradient over ranks, in bf16."""

from collections.abc import Callable

import torch
import torch.distributed as dist

import mplug_ops as ops
from mplug import GradientSink


def sum_compressed(group: ops.Group, smallest: int) -> Callable[[GradientSink], None]:
    """What a sink calls when its gradient is final."""

    def hear(sink: GradientSink) -> None:
        if sink.buffer.numel() < smallest:
            dist.all_reduce(sink.buffer, group=group)
            return
        rounded = sink.buffer.to(torch.bfloat16)
        dist.all_reduce(rounded, group=group)
        sink.buffer.copy_(rounded)

    return hear
