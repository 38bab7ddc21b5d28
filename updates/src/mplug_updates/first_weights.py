"""The master weights with which a run began, beside any optimizer, for entries that a step recalls (`Plan.recalled`).

With adapters, these are the trained adapters alone: new ones change nothing, so the model is the one without them.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mplug.contracts.optimizer import Optimizer, Piece, ShapedState, StepScalars, updated_on
from mplug.errors import UsageError

if TYPE_CHECKING:
    from mplug.model.model import Model
    from mplug.run.run import Run

FIRST, KEPT = "first", "first_kept"
"""The states of a piece: its first weights, and whether they have been kept []."""


class FirstWeights(Optimizer):
    """An optimizer, and the first weights: a state like any other, which checkpoints save and reshard."""

    def __init__(self, optimizer: Optimizer, pieces: list[Piece], device: str) -> None:
        self.inner, self._pieces = optimizer, pieces
        self.one_pass, self.averages = optimizer.one_pass, optimizer.averages
        self.weights, self.shared = optimizer.weights, optimizer.shared
        self.low_precision_gradients = optimizer.low_precision_gradients
        kept = torch.zeros(len(pieces), device=updated_on(pieces, device)).unbind()
        self._states = {
            piece.name: {KEPT: one, FIRST: torch.zeros_like(piece.master)}
            for piece, one in zip(pieces, kept, strict=True)
        }

    @torch.no_grad()
    def keep(self) -> None:
        """Keep the masters, unless a checkpoint has restored the first ones. The CPU waits for the device."""
        for piece in self._pieces:
            state = self._states[piece.name]
            if not bool(state[KEPT]):
                state[FIRST].copy_(piece.master)
                state[KEPT].fill_(1.0)

    def step(self, scalars: StepScalars) -> None:
        """The step of the optimizer."""
        self.inner.step(scalars)

    def states_moved(self) -> None:
        """Pass it on."""
        self.inner.states_moved()

    def tensors(self) -> list[Tensor]:
        """The states of this class, which stay on the device."""
        return [tensor for states in self._states.values() for tensor in states.values()]

    def state(self, piece: Piece) -> "Mapping[str, Tensor | ShapedState]":
        """The live state of a piece: that of the optimizer, and the first weights."""
        return {**self.inner.state(piece), **self._states[piece.name]}


def with_first_weights(run: "Run", model: "Model", optimizer: Optimizer, pieces: list[Piece]) -> Optimizer:
    """The optimizer with the first weights, if the plan recalls entries."""
    return FirstWeights(optimizer, pieces, run.device) if model.plan.recalled else optimizer


def refuse_recalled(run: "Run", model: "Model") -> None:
    """Raise UsageError if the plan recalls entries, and another framework keeps the masters or runs the step."""
    hook = "shard_states" if model.engine is not None else "build_stepper"
    owners = run.hooks.implementers(hook)
    if model.plan.recalled and (model.engine is not None or owners):
        raise UsageError(
            f"{owners[0]} runs steps in its own way, and the objective of this run needs another forward pass with the "
            f"first weights before each step; use a layout without {owners[0]}, or no live reference"
        )
