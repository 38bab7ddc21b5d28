"""Point-to-point transfers of tensors between neighbouring stages."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mplug import MicroBatch, Run

MAX_DIMS = 6
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.float64)
"""The dtypes that can be sent; a header holds the index of the dtype in this tuple."""


class Wire:
    """Sends to and receives from one neighbour.

    Sends are asynchronous, receives block. The sender announces the shapes of a group of tensors once, before the
    first group with these shapes. The receiver expects an announcement once per shape of a micro batch's tokens.
    """

    def __init__(self, run: Run, neighbour: int) -> None:
        self.neighbour, self.device, self.group = neighbour, torch.device(run.device), run.group("pp")
        self.announced: set[tuple[torch.Size, ...]] = set()
        self.expected: dict[torch.Size, list[tuple[tuple[int, ...], torch.dtype]]] = {}
        self.under_way: list[tuple[Any, Tensor]] = []

    def send(self, tensors: list[Tensor]) -> None:
        """Start sending tensors whose shapes and dtypes the neighbour already knows."""
        for tensor in tensors:
            tensor = tensor.contiguous()
            self.under_way.append((dist.isend(tensor, self.neighbour, group=self.group), tensor))

    def send_announced(self, tensors: list[Tensor]) -> None:
        """Start sending tensors; if their shapes are new, send headers first."""
        shapes = tuple(tensor.shape for tensor in tensors)
        if shapes not in self.announced:
            self.announced.add(shapes)
            self.send([torch.tensor(_header(tensor), device=self.device) for tensor in tensors])
        self.send(tensors)

    def receive(self, count: int, batch: MicroBatch) -> list[Tensor]:
        """Receive `count` announced tensors of a micro batch; the shape of its tokens determines their shapes."""
        key = batch["tokens"].shape
        if key not in self.expected:
            headers = [self._receive((MAX_DIMS + 2,), torch.int64).tolist() for _ in range(count)]
            self.expected[key] = [(tuple(shape[:dims]), DTYPES[dtype]) for dtype, dims, *shape in headers]
        return [self._receive(shape, dtype) for shape, dtype in self.expected[key]]

    def receive_like(self, tensors: list[Tensor]) -> list[Tensor]:
        """Receive the gradients of tensors that were sent: same number, shapes and dtypes."""
        return [self._receive(tensor.shape, tensor.dtype) for tensor in tensors]

    def _receive(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        tensor = torch.empty(shape, dtype=dtype, device=self.device)
        dist.recv(tensor, self.neighbour, group=self.group)
        return tensor

    def finish_sends(self) -> None:
        """Wait for all sends."""
        for work, _ in self.under_way:
            work.wait()
        self.under_way.clear()


def _header(tensor: Tensor) -> list[int]:
    """[index of the dtype, number of dimensions, shape, zeros up to MAX_DIMS]."""
    return [DTYPES.index(tensor.dtype), tensor.dim(), *tensor.shape, *[0] * (MAX_DIMS - tensor.dim())]
