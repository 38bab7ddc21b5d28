"""An average of the master weights over the updates of a run, beside any optimizer (`optimizer.average`)."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mplug.config.host_sections import Average
from mplug.contracts.optimizer import AVERAGE, Optimizer, Piece, ShapedState, StepScalars, updated_on
from mplug.errors import UsageError

if TYPE_CHECKING:
    from mplug.model.model import Model
    from mplug.run.run import Run

COUNT = "num_averaged"
"""The state [] that counts the updates of a piece."""
FIELD = "optimizer.average"


class AveragedOptimizer(Optimizer):
    """After each update of an optimizer, moves an average of every master: an optimizer state like any other.

    So the average is cut as the master is, and a checkpoint saves and reshards it. The first weights are the first
    average; before the first update, and in skipped steps, the average is that of the updates so far.
    """

    averages = True

    def __init__(self, optimizer: Optimizer, pieces: list[Piece], section: Average, device: str) -> None:
        self._optimizer, self._pieces, self._section = optimizer, pieces, section
        self.one_pass = optimizer.one_pass
        self.low_precision_gradients = optimizer.low_precision_gradients
        self._counts = torch.zeros(len(pieces), device=updated_on(pieces, device))
        self._states = {
            piece.name: {COUNT: count, AVERAGE: torch.zeros_like(piece.master)}
            for piece, count in zip(pieces, self._counts.unbind(), strict=True)
        }

    @torch.no_grad()
    def step(self, scalars: StepScalars) -> None:
        """Update every piece's master once, and move its average."""
        self._optimizer.step(scalars)
        skipped = scalars.skip > 0
        self._counts.add_((~skipped).to(self._counts.dtype))
        weights = self._weights(skipped.to(self._counts.device))
        for piece, weight in zip(self._pieces, weights.unbind(), strict=True):
            self._states[piece.name][AVERAGE].lerp_(piece.master, weight.to(piece.master.dtype))

    def states_moved(self) -> None:
        """Pass it on."""
        self._optimizer.states_moved()

    def _weights(self, skipped: Tensor) -> Tensor:
        """The weight of the new value in the average of each piece [P], in fp64."""
        counted = self._counts.double() - self._section.start
        decay = self._section.decay
        later = 1 / counted.clamp(min=1.0) if decay is None else torch.full_like(counted, 1 - decay)
        return torch.where(counted <= 1, 1.0, later.masked_fill(skipped, 0.0))

    def state(self, piece: Piece) -> "Mapping[str, Tensor | ShapedState]":
        """The live state of a piece: that of the optimizer, the average, and the number of updates."""
        return {**self._optimizer.state(piece), **self._states[piece.name]}


def with_average(run: "Run", optimizer: Optimizer, pieces: list[Piece]) -> Optimizer:
    """The optimizer with the average of the config, if it names one. UsageError if it keeps averages itself."""
    if run.config.average is None:
        return optimizer
    if optimizer.averages:
        (label,) = run.hooks.implementers("build_optimizer")
        raise UsageError(f"{FIELD}: {label}, or the optimizer of a group, keeps averages itself; remove the field")
    return AveragedOptimizer(optimizer, pieces, run.config.average, run.device)


def refuse_average(run: "Run", model: "Model") -> None:
    """Raise UsageError if the config names an average, and another framework updates the masters."""
    if run.config.average is not None and model.engine is not None:
        (label,) = run.hooks.implementers("shard_states")
        raise UsageError(f"{FIELD}: the engine of {label} keeps the master weights itself; remove the field")
