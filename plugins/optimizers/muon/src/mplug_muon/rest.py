"""Torch's fused AdamW, for the pieces that are not hidden matrices."""

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mplug import Piece, StepScalars
from mplug_updates import TorchOptimizer

if TYPE_CHECKING:
    from mplug_muon.config import MuonConfig


class FusedAdamW(TorchOptimizer):
    """One fused pass over these pieces, with a learning rate of its own."""

    def __init__(self, pieces: list[Piece], config: "MuonConfig") -> None:
        self._lr_ratio = 1.0 if config.adamw_lr is None else config.adamw_lr / config.lr
        betas = (config.adamw_beta1, config.adamw_beta2)
        settings = {"lr": torch.tensor(config.lr), "betas": betas, "eps": config.adamw_eps}
        super().__init__(pieces, partial(torch.optim.AdamW, **settings, fused=True), _zeros)

    def step(self, scalars: StepScalars) -> None:
        """Update every piece's master once."""
        super().step(replace(scalars, lr=scalars.lr * self._lr_ratio))


def _zeros(piece: Piece) -> dict[str, Tensor]:
    return {
        "step": torch.zeros((), device=piece.master.device),
        "exp_avg": torch.zeros_like(piece.master),
        "exp_avg_sq": torch.zeros_like(piece.master),
    }
