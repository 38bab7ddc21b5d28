"""Torch's fused SGD as an optimizer of pieces."""

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mplug import Piece, StepScalars, TorchOptimizer

if TYPE_CHECKING:
    from mplug_sgd.config import SGDConfig


class FusedSGD(TorchOptimizer):
    """One fused pass over all pieces; decoupled decay, which torch's SGD lacks, is a pass before it."""

    def __init__(self, pieces: list[Piece], config: "SGDConfig") -> None:
        self._decoupled = self.tensor_decay = config.decoupled_weight_decay  # torch's own decay is a number
        self._decayed = [piece.master for piece in pieces if piece.parameter.decays]
        settings = {"lr": config.lr, "momentum": config.momentum, "nesterov": config.nesterov}

        def velocity(piece: Piece) -> dict[str, Tensor]:
            return {"momentum_buffer": torch.zeros_like(piece.master)} if config.momentum else {}

        super().__init__(pieces, partial(torch.optim.SGD, **settings, fused=True), velocity)

    def step(self, scalars: StepScalars) -> None:
        """Update every piece's master once; torch scales gradients in place."""
        if self._decoupled:
            self._decay(scalars)
            scalars = replace(scalars, weight_decay=0.0)
        super().step(scalars)

    def _decay(self, scalars: StepScalars) -> None:
        """Apply decoupled decay to masters; in a skipped step, the factor is exactly 1."""
        if self._decayed:
            factor = (1 - scalars.lr * scalars.weight_decay).masked_fill(scalars.skip > 0, 1.0)
            torch._foreach_mul_(self._decayed, factor)
