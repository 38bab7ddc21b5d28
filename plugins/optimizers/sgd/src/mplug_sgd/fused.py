"""Torch's fused SGD as an optimizer of pieces."""

from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mplug import Piece, StepScalars
from mplug_updates import TorchOptimizer

if TYPE_CHECKING:
    from mplug_sgd.config import SGDConfig


class FusedSGD(TorchOptimizer):
    """One fused pass over all pieces; the decay, decoupled or of gradients, is a pass before it."""

    def __init__(self, pieces: list[Piece], config: "SGDConfig") -> None:
        self._decoupled = config.decoupled_weight_decay
        settings = {"lr": config.lr, "momentum": config.momentum, "nesterov": config.nesterov}

        def velocity(piece: Piece) -> dict[str, Tensor]:
            return {"momentum_buffer": torch.zeros_like(piece.master)} if config.momentum else {}

        super().__init__(pieces, partial(torch.optim.SGD, **settings, fused=True), velocity)

    def decay(self, scalars: StepScalars) -> None:
        """Decay the masters, or add the gradient of the L2 penalty to the gradients, which torch scales afterwards."""
        if self._decoupled:
            super().decay(scalars)
            return
        decay = scalars.weight_decay / scalars.scale
        for piece in self.decayed:
            piece.gradient.addcmul_(piece.master, decay)
