"""Point-to-point transfers of tensors between neighbouring stages."""

import json
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mplug import MicroBatch, Run, RunError

HEADER = 256
"""Bytes of an announcement: a tensor's dtype and shape as JSON, padded with spaces."""

Layout = tuple[torch.dtype, tuple[int, ...]]
"""The dtype and the shape of a tensor."""


class Wire:
    """Sends the named activations to one neighbour, or receives them from it, and their gradients in return.

    Sends are asynchronous, receives block. The shape of a micro batch's tokens determines the dtypes and shapes of its
    activations. The sender announces them with the first micro batch of each such shape, and raises RunError if a later
    one differs: the receiver would wait for other messages than the sender sends.
    """

    def __init__(self, run: Run, neighbour: int, names: tuple[str, ...]) -> None:
        self.neighbour, self.names = neighbour, names
        self.device, self.group = torch.device(run.device), run.group("pp")
        self.announced: dict[torch.Size, list[Layout]] = {}
        self.under_way: list[tuple[Any, Tensor]] = []

    def send(self, tensors: list[Tensor]) -> None:
        """Start sending tensors whose shapes and dtypes the neighbour already knows."""
        for tensor in tensors:
            tensor = tensor.contiguous()
            self.under_way.append((dist.isend(tensor, self.neighbour, group=self.group), tensor))

    def send_announced(self, tensors: list[Tensor], batch: MicroBatch) -> None:
        """Start sending the activations of a micro batch; send headers first if the shape of its tokens is new."""
        tokens, layouts = batch["tokens"].shape, [(tensor.dtype, tuple(tensor.shape)) for tensor in tensors]
        if tokens not in self.announced:
            headers = [_header(name, *layout) for name, layout in zip(self.names, layouts, strict=True)]
            self.send([header.to(self.device) for header in headers])
            self.announced[tokens] = layouts
        for name, layout, announced in zip(self.names, layouts, self.announced[tokens], strict=True):
            if layout != announced:
                raise RunError(
                    f"the activation '{name}' that crosses pipeline stages has {_words(layout)} for tokens of shape "
                    f"{tuple(tokens)}, and had {_words(announced)} before; it must keep its dtype and shape"
                )
        self.send(tensors)

    def receive(self, batch: MicroBatch) -> list[Tensor]:
        """Receive the activations of a micro batch, after their headers if the shape of its tokens is new."""
        tokens = batch["tokens"].shape
        if tokens not in self.announced:
            self.announced[tokens] = [_layout(self._receive(torch.uint8, (HEADER,))) for _ in self.names]
        return [self._receive(*layout) for layout in self.announced[tokens]]

    def receive_like(self, tensors: list[Tensor]) -> list[Tensor]:
        """Receive the gradients of tensors that were sent: same number, shapes and dtypes."""
        return [self._receive(tensor.dtype, tensor.shape) for tensor in tensors]

    def _receive(self, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        tensor = torch.empty(shape, dtype=dtype, device=self.device)
        dist.recv(tensor, self.neighbour, group=self.group)
        return tensor

    def finish_sends(self) -> None:
        """Wait for all sends."""
        for work, _ in self.under_way:
            work.wait()
        self.under_way.clear()


def _header(name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    text = json.dumps([str(dtype).removeprefix("torch."), *shape]).encode()
    if len(text) > HEADER:
        raise RunError(f"the activation '{name}' has {len(shape)} dimensions, too many to cross pipeline stages")
    return torch.frombuffer(bytearray(text.ljust(HEADER)), dtype=torch.uint8)


def _layout(header: Tensor) -> Layout:
    name, *shape = json.loads(bytes(header.tolist()))
    return getattr(torch, name), tuple(shape)


def _words(layout: Layout) -> str:
    dtype, shape = layout
    return f"{str(dtype).removeprefix('torch.')} of shape {shape}"
