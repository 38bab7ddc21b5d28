"""Tensors between neighbouring stages."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mplug import MicroBatch, Run

MAX_DIMS = 7


class Wire:
    """To and from one neighbour. Sends do not block. Shapes travel once for every shape of micro batch."""

    def __init__(self, run: Run, neighbour: int) -> None:
        self.neighbour, self.device, self.group = neighbour, torch.device(run.device), run.group("pp")
        self.announced: set[tuple[torch.Size, ...]] = set()
        self.expected: dict[torch.Size, list[tuple[int, ...]]] = {}
        self.under_way: list[tuple[Any, Tensor]] = []

    def send(self, tensors: list[Tensor]) -> None:
        """Begin to send tensors whose shapes the neighbour knows."""
        for tensor in tensors:
            tensor = tensor.contiguous()
            self.under_way.append((dist.isend(tensor, self.neighbour, group=self.group), tensor))

    def send_announced(self, tensors: list[Tensor]) -> None:
        """Begin to send tensors, and before them their shapes, if these are new."""
        shapes = tuple(tensor.shape for tensor in tensors)
        if shapes not in self.announced:
            self.announced.add(shapes)
            headers = [[len(shape), *shape, *[0] * (MAX_DIMS - len(shape))] for shape in shapes]
            self.send([torch.tensor(header, device=self.device) for header in headers])
        self.send(tensors)

    def receive(self, count: int, batch: MicroBatch) -> list[Tensor]:
        """`count` announced tensors of a micro batch; their shapes are a function of the shape of its tokens."""
        key = batch["tokens"].shape
        if key not in self.expected:
            headers = [self._receive((MAX_DIMS + 1,), torch.int64).tolist() for _ in range(count)]
            self.expected[key] = [tuple(header[1 : 1 + header[0]]) for header in headers]
        return [self._receive(shape, torch.float32) for shape in self.expected[key]]

    def receive_like(self, tensors: list[Tensor]) -> list[Tensor]:
        """As many tensors of the same shapes: the gradients of what was sent."""
        return [self._receive(tensor.shape, tensor.dtype) for tensor in tensors]

    def _receive(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        tensor = torch.empty(shape, dtype=dtype, device=self.device)
        dist.recv(tensor, self.neighbour, group=self.group)
        return tensor

    def finish_sends(self) -> None:
        """Wait until everything has left."""
        for work, _ in self.under_way:
            work.wait()
        self.under_way.clear()
