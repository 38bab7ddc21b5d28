"""Torch's fused AdamW as an optimizer of pieces, on any device and without Triton."""

from functools import partial
from typing import TYPE_CHECKING

import torch

from mplug import Piece
from mplug_adamw.state import States
from mplug_updates import TorchOptimizer

if TYPE_CHECKING:
    from mplug_adamw.config import AdamWConfig


class FusedAdamW(TorchOptimizer):
    """One fused pass over all pieces."""

    def __init__(self, pieces: list[Piece], config: "AdamWConfig") -> None:
        settings = {"lr": torch.tensor(config.lr), "betas": (config.beta1, config.beta2), "eps": config.eps}
        super().__init__(pieces, partial(torch.optim.AdamW, **settings, fused=True), States(pieces).of)
