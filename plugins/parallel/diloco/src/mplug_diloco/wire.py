"""Formats in which differences travel, and the mean over workers of what has travelled.

| format | bytes per element | bound on the error of an element x of a block (256 elements) with the largest value m |
|---|---|---|
| full | those of the master | that of the sum |
| bf16 | 2 | 2^-8 abs(x) |
| int8 | 1 + 1/64 | m / 254 |
| int4 | 1/2 + 1/64 | m / 14 |

A rounded difference is gathered from all workers, and each worker sums the same values in the same order in the
master's precision: the mean has at most the largest error of a worker, and is equal on all workers, to the last bit.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from mplug_ops.transfers import gathering, summing_all

BLOCK = 256
"""Elements that share a scale, an fp32 number."""
LEVELS = {"int8": 127, "int4": 7}
"""The largest integer of a format, which stands for the largest value of a block."""


def encoded(values: Tensor, wire: str) -> Tensor:
    """Values [N] as bytes [M], with M = `num_bytes(N, wire)`."""
    if wire == "bf16":
        return values.to(torch.bfloat16).view(torch.uint8)
    blocks = pad(values, (0, -len(values) % BLOCK)).view(-1, BLOCK)
    scales = (blocks.abs().amax(dim=1) / LEVELS[wire]).float()
    steps = torch.where(scales == 0, torch.ones_like(scales), scales).to(values.dtype)
    numbers = (blocks / steps[:, None]).round().to(torch.int8).flatten()
    if wire == "int4":
        low, high = (numbers + 8).to(torch.uint8).view(-1, 2).unbind(dim=1)
        numbers = low | (high << 4)
    return torch.cat((scales.view(torch.uint8), numbers.view(torch.uint8)))


def decoded(encoding: Tensor, number: int, wire: str, dtype: torch.dtype) -> Tensor:
    """The values [N] of bytes [M] that `encoded` has made of N = `number` values."""
    if wire == "bf16":
        return encoding.view(torch.bfloat16).to(dtype)
    num_blocks = -(-number // BLOCK)
    scales, numbers = encoding[: 4 * num_blocks].view(torch.float32), encoding[4 * num_blocks :]
    if wire == "int4":
        integers = torch.stack((numbers & 15, numbers >> 4), dim=1).flatten().to(torch.int8) - 8
    else:
        integers = numbers.view(torch.int8)
    return (integers.view(-1, BLOCK).to(dtype) * scales[:, None].to(dtype)).flatten()[:number]


def num_bytes(number: int, wire: str, itemsize: int = 4) -> int:
    """Bytes of `number` values in a format; `itemsize` is that of a master weight."""
    if wire == "full":
        return number * itemsize
    if wire == "bf16":
        return number * 2
    num_blocks = -(-number // BLOCK)
    return num_blocks * (4 + (BLOCK if wire == "int8" else BLOCK // 2))


def bytes_sent(number: int, wire: str, workers: int, itemsize: int = 4) -> int:
    """Bytes that a rank sends to exchange `number` values: by a ring all-reduce in full, else by a ring all-gather."""
    sent = num_bytes(number, wire, itemsize) * (workers - 1)
    return 2 * sent // workers if wire == "full" else sent


class Mean:
    """The mean over workers of values [N], under way from its creation on."""

    def __init__(self, values: Tensor, wire: str, group: dist.ProcessGroup) -> None:
        self.wire, self.values, self._workers = wire, values, group.size()
        self._work: Any = summing_all(values, group) if wire == "full" else gathering(encoded(values, wire), group)

    def wait(self) -> Tensor:
        """The mean [N]; on a GPU, the current stream waits for it."""
        arrived = self._work.wait()
        if self.wire == "full":
            return self.values / self._workers
        total = torch.zeros_like(self.values)
        for encoding in arrived.unbind():
            total += decoded(encoding, len(total), self.wire, total.dtype)
        return total / self._workers
