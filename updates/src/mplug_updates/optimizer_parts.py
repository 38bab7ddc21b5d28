"""Optimizers of disjoint pieces as one optimizer."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from torch import Tensor

from mplug.contracts.optimizer import Optimizer, Piece, ShapedState, StepScalars


class Rate(NamedTuple):
    """A rate of a group: `factor` times that of the run, plus `added`."""

    factor: float = 1.0
    added: float = 0.0

    def times(self, factor: float) -> "Rate":
        """The rate with another factor."""
        return Rate(self.factor * factor, self.added * factor)

    def of(self, rate: Tensor) -> Tensor:
        """The rate [] of the group, rounded once."""
        return rate if self == UNCHANGED else (rate.double() * self.factor + self.added).to(rate.dtype)


UNCHANGED = Rate()


class Part(NamedTuple):
    """The optimizer of a group, its pieces on this rank, and its rates."""

    optimizer: Optimizer
    pieces: Sequence[Piece]
    lr: Rate
    weight_decay: Rate

    def step(self, scalars: StepScalars) -> None:
        """Update the pieces of the group once."""
        lr, weight_decay = self.lr.of(scalars.lr), self.weight_decay.of(scalars.weight_decay)
        self.optimizer.step(replace(scalars, lr=lr, weight_decay=weight_decay))


class GroupedOptimizer(Optimizer):
    """Optimizers of disjoint pieces, each with its own learning rate and weight decay."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self._parts = parts
        self._of = {piece.name: part.optimizer for part in parts for piece in part.pieces}
        used = [part.optimizer for part in parts if part.pieces] or [part.optimizer for part in parts]
        self.one_pass = all(one.one_pass for one in used)
        self.low_precision_gradients = all(one.low_precision_gradients for one in used)
        self.averages = any(part.optimizer.averages for part in parts)

    def step(self, scalars: StepScalars) -> None:
        """Update every piece's master once."""
        for part in self._parts:
            part.step(scalars)

    def state(self, piece: Piece) -> Mapping[str, Tensor | ShapedState]:
        """The live state of a piece."""
        return self._of[piece.name].state(piece)
