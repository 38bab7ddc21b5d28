"""Point-to-point transfers of tensors between the ranks of a pipeline."""

import json
from collections import deque
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mplug import MicroBatch, Model, Run, RunError

HEADER = 256
"""Bytes of an announcement: an activation's name, dtype and shape as JSON, padded with spaces."""

Layout = tuple[torch.dtype, tuple[int, ...]]
"""The dtype and the shape of a tensor."""
Key = tuple[Any, ...]
"""The dtypes and shapes of the entries of a micro batch: these determine the dtypes and shapes of its activations."""


class Arrival:
    """Tensors that are being received."""

    def __init__(self, works: list[Any], tensors: list[Tensor]) -> None:
        self._works, self._tensors = works, tensors

    def wait(self) -> list[Tensor]:
        """The tensors. On a GPU the current stream waits for them, the CPU does not."""
        for work in self._works:
            work.wait()
        return self._tensors


class Wire:
    """Sends tensors to one rank of the pipeline and receives tensors from it.

    Both directions have a communicator of their own (`sending`, `receiving`), so that a send never waits for a receive.
    Transfers start when they are called and overlap with computation. Each rank starts them in the order of its row of
    the table.
    """

    def __init__(self, peer: int, device: str, sending: Any, receiving: Any) -> None:
        self.peer, self.device = peer, torch.device(device)
        self.sending, self.receiving = sending, receiving
        self.under_way: deque[tuple[Any, Tensor]] = deque()

    def send(self, tensors: Iterable[Tensor]) -> None:
        """Start to send tensors. A sent tensor is released when the next actions find that it has arrived."""
        self.release()
        if self.under_way and self.device.type != "cuda":
            self.finish()  # gloo reports the end of a send only to a waiting caller
        for tensor in tensors:
            tensor = tensor.contiguous()
            self.under_way.append((dist.isend(tensor, self.peer, group=self.sending), tensor))

    def receive(self, layouts: Iterable[Layout]) -> Arrival:
        """Start to receive tensors of these dtypes and shapes."""
        tensors = [torch.empty(shape, dtype=dtype, device=self.device) for dtype, shape in layouts]
        works = [dist.irecv(tensor, self.peer, group=self.receiving) for tensor in tensors]
        return Arrival(works, tensors)

    def release(self) -> None:
        """Release the tensors that have been sent."""
        while self.under_way and self.under_way[0][0].is_completed():
            self.under_way.popleft()[0].wait()

    def finish(self) -> None:
        """Wait for all sends."""
        while self.under_way:
            self.under_way.popleft()[0].wait()


def wires_of(run: Run, model: Model) -> dict[int, Wire]:
    """The wires of this rank to the ranks with a neighbouring chunk, by their index along the pipeline. Collective."""
    members = [*run.mesh.group(run.rank, "pp")]
    own = members.index(run.rank)
    ranks = [model.stages.rank_of(chunk) for chunk in range(len(model.stages.units))]
    near = {other for pair in pairwise(ranks) if own in pair for other in pair} - {own}
    up, down = (run.group("pp", use=f"pipeline {way}") for way in ("up", "down"))
    return {peer: Wire(members[peer], run.device, *((up, down) if peer > own else (down, up))) for peer in sorted(near)}


class Crossing:
    """The activations that cross from one chunk to the next one on another rank.

    The sender announces their names, dtypes and shapes with the first micro batch whose entries have new shapes. It
    raises RunError if those of a later one differ: the receiver would wait for other messages than the sender sends.
    """

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names
        self.announced: dict[Key, list[Layout]] = {}

    def send(self, wire: Wire, tensors: list[Tensor], key: Key) -> None:
        """Start to send the activations of a micro batch."""
        layouts = [(tensor.dtype, tuple(tensor.shape)) for tensor in tensors]
        if key not in self.announced:
            headers = [_header(name, *layout) for name, layout in zip(self.names, layouts, strict=True)]
            wire.send(header.to(wire.device) for header in headers)
            self.announced[key] = layouts
        for name, layout, announced in zip(self.names, layouts, self.announced[key], strict=True):
            if layout != announced:
                raise RunError(
                    f"the activation '{name}' that crosses pipeline stages has {_words(layout)}, and had "
                    f"{_words(announced)} for an earlier micro batch whose entries have the same shapes; its dtype and "
                    f"shape may depend on nothing else"
                )
        wire.send(tensors)

    def receive(self, wire: Wire, key: Key) -> Callable[[], list[Tensor]]:
        """Start to receive the activations of a micro batch; the result waits for them."""
        if key not in self.announced:
            headers = wire.receive([(torch.uint8, (HEADER,))] * len(self.names)).wait()
            self.announced[key] = [_layout(name, header) for name, header in zip(self.names, headers, strict=True)]
        return wire.receive(self.announced[key]).wait


def key_of(batch: MicroBatch) -> Key:
    """The key of a micro batch: equal on all ranks of the pipeline, because all of them have its entries."""
    entries = [(name, batch[name]) for name in sorted(batch) if isinstance(batch[name], Tensor)]
    return tuple((name, entry.dtype, entry.shape) for name, entry in entries)


def _header(name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    text = json.dumps([name, str(dtype).removeprefix("torch."), *shape]).encode()
    if len(text) > HEADER:
        raise RunError(
            f"the activation '{name}' cannot cross pipeline stages: its name and its {len(shape)} dimensions take more "
            f"than {HEADER} bytes; give it a shorter name or fewer dimensions in the plan"
        )
    return torch.frombuffer(bytearray(text.ljust(HEADER)), dtype=torch.uint8)


def _layout(name: str, header: Tensor) -> Layout:
    """The announced layout; RunError if another activation arrives than the one that this rank waits for."""
    sent, dtype, *shape = json.loads(bytes(header.tolist()))
    if sent != name:
        raise RunError(f"the stage before this one sends the activation '{sent}', and this stage expects '{name}'")
    return getattr(torch, dtype), tuple(shape)


def _words(layout: Layout) -> str:
    dtype, shape = layout
    return f"{str(dtype).removeprefix('torch.')} of shape {shape}"
