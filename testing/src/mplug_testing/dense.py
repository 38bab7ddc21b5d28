"""Artificial pieces, on which the suite checks an optimizer update by update.

They have every shape of a model's parameters (matrices, a fused matrix, a look-up table, experts, vectors, a scalar).
There are matrices and vectors with weight decay and without.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from mplug.contracts.optimizer import Piece, StepScalars, tensors_of
from mplug.layout.mesh import Axis, Mesh, contiguous
from mplug.layout.ownership import Bucket, Sharding
from mplug.layout.placement import Placement
from mplug.layout.plan import Init, Parameter, Segment
from mplug.model.assembler import Assembler
from mplug.model.single_optimizer import single_optimizer
from mplug.run.run import Run
from mplug.tensors.random import key_of
from mplug_testing.suite import naming_failures

INIT = Init("constant")
HEADS, KV_HEADS = Segment("heads", 4, 4), Segment("kv_heads", 2, 4, uneven="copy")
VOCAB = Segment("vocab", 11, uneven="pad")
PARAMETERS = {
    "matrix": (Parameter(("mlp", "embed"), INIT), (20, 12)),
    "wide matrix": (Parameter(("embed", "mlp"), INIT), (12, 20)),
    "fused matrices": (Parameter(((HEADS, KV_HEADS, KV_HEADS), "embed"), INIT), (32, 12)),
    "matrix that does not decay": (Parameter(("mlp", "embed"), INIT, decay=False), (8, 12)),
    "table": (Parameter((VOCAB, "embed"), INIT), (11, 12)),
    "experts": (Parameter(("expert", "mlp", "embed"), INIT), (3, 8, 12)),
    "vector": (Parameter(("embed",), INIT), (12,)),
    "vector that decays": (Parameter(("embed",), INIT, decay=True), (12,)),
    "scalar": (Parameter((), INIT), ()),
}
Where = tuple[Any, ...]
Tensors = Mapping[str, Tensor]
Gradient = Callable[[Piece, int], Tensor]
"""(piece, number of a step) -> the piece's gradient in that step."""


def drawn(shape: tuple[int, ...], device: torch.device | str, *words: str | int) -> Tensor:
    """Normal random numbers that depend only on `words`."""
    generator = torch.Generator().manual_seed(abs(key_of(*words)))
    return torch.randn(shape, generator=generator).to(device)


def make_pieces(device: str) -> list[Piece]:
    """A piece of every shape, whole, that is its own weight."""
    mesh, pieces = Mesh.of([], 1), []
    for name, (parameter, shape) in PARAMETERS.items():
        master, placement = drawn(shape, device, name), Placement(name, parameter, shape, mesh)
        pieces.append(Piece(name, master, torch.zeros_like(master), None, parameter, placement))
    return pieces


def with_weights(pieces: list[Piece]) -> list[Piece]:
    """The pieces, each with a bf16 copy of its master beside it."""
    return [replace(piece, weight=piece.master.bfloat16()) for piece in pieces]


def padding(device: str) -> tuple[Piece, int]:
    """(a piece that is only padding, its rank): the last of four ranks that share five rows."""
    mesh = Mesh.of([Axis("rows", 4, splits=("vocab",))], 4)
    parameter = Parameter((Segment("vocab", 5, uneven="pad"), "embed"), INIT)
    placement = Placement("padding", parameter, (5, 12), mesh)
    master = torch.zeros(placement.local_shape(3), device=device)
    return Piece("padding", master, torch.zeros_like(master), None, parameter, placement), 3


def halves(pieces: list[Piece], rank: int) -> list[Piece]:
    """What the first or the second of two ranks owns of pieces: flat views of their tensors, with such placements."""
    mesh, found = Mesh.of([Axis("halves", 2, entries={"batch": contiguous})], 2), []
    for piece in pieces:
        numel = piece.master.numel()
        bucket = Bucket((piece.name,), (0,), (numel,), numel + numel % 2, ("halves",), num_owners=2)
        placement = Sharding((bucket,)).placed(replace(piece.placement, mesh=mesh))
        if placement.holds(rank):
            own = slice(*placement.part(rank))
            master, gradient = (tensor.flatten()[own] for tensor in (piece.master, piece.gradient))
            found.append(replace(piece, master=master, gradient=gradient, placement=placement))
    return found


def matrices(piece: Piece) -> Iterator[tuple[str, Where]]:
    """(name, index) of every matrix of a whole piece: one for each segment and each expert."""
    for box in piece.placement.boxes(0):
        where = tuple(slice(start, start + length) for start, length in zip(box.offset, box.shape, strict=True))
        if len(box.shape) == 3:
            yield from ((f"'{piece.name}', number {n},", (n, *where[1:])) for n in range(box.shape[0]))
        elif box.shape == piece.placement.shape:
            yield f"'{piece.name}'", where
        else:
            yield f"'{piece.name}', the matrix that begins at {box.start},", where


def gradient_of(piece: Piece, number: int) -> Tensor:
    """A gradient that differs in every step."""
    return drawn(tuple(piece.gradient.shape), piece.gradient.device, piece.name, number)


def times(factor: float) -> Gradient:
    """The gradients of `gradient_of`, multiplied by a number."""
    return lambda piece, number: gradient_of(piece, number) * factor


class Bench:
    """An optimizer of artificial pieces; the Fault of a failing optimizer describes the pieces by `subject`."""

    def __init__(self, run: Run, pieces: list[Piece], subject: str = "pieces") -> None:
        self.run, self.pieces, self.subject = run, pieces, subject
        placements = {piece.name: piece.placement for piece in pieces}
        self.assembler = Assembler(run, placements, tuple(placements.values()))
        with naming_failures(f"building it of {subject}"):
            self.optimizer = single_optimizer(run, pieces, self.assembler)

    def scalars(
        self, lr: float = 1e-2, weight_decay: float = 0.1, scale: float = 1.0, skip: float = 0.0
    ) -> StepScalars:
        """A step's scalars, on the device."""
        device = self.run.device
        rate, factor, skipped, decay = (torch.tensor(value, device=device) for value in (lr, scale, skip, weight_decay))
        return StepScalars(rate, factor, skipped, decay)

    def step(self, number: int, gradient: Gradient = gradient_of, **scalars: float) -> None:
        """Run an update with the gradients of a step; they depend only on its number. The run's first step is 1."""
        self.run.step = number + 1
        for piece in self.pieces:
            piece.gradient.copy_(gradient(piece, number))
        with naming_failures(f"a step of {self.subject}"):
            self.optimizer.step(self.scalars(**scalars))

    def states(self) -> Iterator[tuple[Piece, str, Tensor]]:
        """(piece, name, tensor) of the optimizer's whole state."""
        for piece in self.pieces:
            for name, tensor in tensors_of(self.optimizer.state(piece)).items():
                yield piece, name, tensor

    def masters(self) -> dict[str, Tensor]:
        """Copies of the masters."""
        return {f"the weight '{piece.name}'": piece.master.clone() for piece in self.pieces}

    def snapshot(self) -> dict[str, Tensor]:
        """Copies of masters and state."""
        states = {f"the state '{name}' of '{piece.name}'": tensor.clone() for piece, name, tensor in self.states()}
        return {**self.masters(), **states}


def other_bits(one: Tensors, other: Tensors) -> str:
    """The name of the first tensor whose bits differ; empty if there is none."""
    return next((name for name, tensor in one.items() if not torch.equal(tensor, other[name])), "")


def apart(one: Tensors, other: Tensors, tolerance: float) -> str:
    """The first tensor that differs by more than `tolerance` times its largest value, by name; empty if none."""
    for name, tensor in one.items():
        if not float((tensor - other[name]).abs().max()) <= tolerance * float(tensor.abs().max()):
            return name
    return ""


READING = {
    *("item", "tolist", "numpy", "cpu", "nonzero", "masked_select", "equal", "is_nonzero", "allclose"),
    *("__bool__", "__float__", "__int__", "__index__", "__contains__", "__array__"),
}


class HostReads(Exception):
    """A function, which the message names, read a tensor's value on the CPU."""


class NoReading(TorchFunctionMode):
    """While it is active, reading a tensor's value on the CPU raises HostReads: on a GPU the CPU would wait."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """torch calls this for each of its functions."""
        name = getattr(func, "__name__", "")
        if name in READING:
            raise HostReads(name)
        return func(*args, **(kwargs or {}))
