"""Schedule-free AdamW (algorithm 1 of arXiv 2405.15682) over pieces.

The master is y, at which gradients are computed. The states are z, which the updates move, and x, the average of all z,
which evaluations and exports use.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mplug import AVERAGE, Optimizer, Piece, StepScalars, updated_on

if TYPE_CHECKING:
    from mplug_schedulefree.config import ScheduleFreeConfig


class AveragedAdamW(Optimizer):
    """Updates one piece after another; gradients are scratch memory."""

    averages = True

    def __init__(self, pieces: list[Piece], config: "ScheduleFreeConfig", device: str) -> None:
        self._config, self._pieces = config, pieces
        counted_on = updated_on(pieces, device)
        self._steps, self._largest, self._weights = (torch.zeros(len(pieces), device=counted_on) for _ in range(3))
        numbers = zip(self._steps.unbind(), self._largest.unbind(), self._weights.unbind(), strict=True)
        self._states = {
            piece.name: {
                "step": step,
                "largest_lr": largest,
                "sum_of_weights": weight,
                "fast": piece.master.clone(),
                AVERAGE: piece.master.clone(),
                "exp_avg_sq": torch.zeros_like(piece.master),
            }
            for piece, (step, largest, weight) in zip(pieces, numbers, strict=True)
        }

    @torch.no_grad()
    def step(self, scalars: StepScalars) -> None:
        """Update every piece's master once."""
        skipped = scalars.skip > 0
        begins = ((self._steps == 0) & ~skipped).to(self._steps.dtype)
        shares = self._shares(scalars.lr, skipped)
        for piece, begin, share, step in zip(
            self._pieces, begins.unbind(), shares.unbind(), self._steps.unbind(), strict=True
        ):
            self._update(piece, begin, share, step, scalars, skipped)

    def _shares(self, lr: Tensor, skipped: Tensor) -> Tensor:
        """The share of the new z in the average of each piece [P], in fp64; the weight of a step is t^r lr_max^p."""
        config = self._config
        self._steps.add_((~skipped).to(self._steps.dtype))
        torch.maximum(self._largest, lr.masked_fill(skipped, 0.0), out=self._largest)
        weights = self._steps.double() ** config.power * self._largest.double() ** config.lr_power
        self._weights.add_(weights.masked_fill(skipped, 0.0))
        return torch.where(self._weights > 0, weights / self._weights.double(), 0.0).clamp(max=1.0)

    def _update(
        self, piece: Piece, begin: Tensor, share: Tensor, step: Tensor, scalars: StepScalars, skipped: Tensor
    ) -> None:
        """z <- z - lr g / sqrt(v), x <- (1 - c) x + c z, y <- (1 - beta1) z + beta1 x."""
        config, master, state = self._config, piece.master, self._states[piece.name]
        kind = master.dtype
        fast, average, squares = state["fast"], state[AVERAGE], state["exp_avg_sq"]
        for held in (fast, average):  # the first update begins at the weights
            held.lerp_(master, begin.to(kind))
        gradient = piece.gradient.mul_(scalars.scale).masked_fill_(skipped, 0.0)
        squares.lerp_(gradient.square(), (1 - config.beta2) * (~skipped).to(kind))
        unbias = (1 - config.beta2 ** step.clamp(min=1.0).double()).to(kind)
        update = gradient.div_((squares / unbias).sqrt_().add_(config.eps))
        if piece.parameter.decays:
            update.addcmul_(master, scalars.weight_decay.to(kind))
        fast.sub_(update.mul_(scalars.lr.masked_fill(skipped, 0.0)))
        average.lerp_(fast, share.masked_fill(skipped, 0.0).to(kind))
        master.copy_(torch.where(skipped, master, torch.lerp(fast, average, config.beta1)))

    def state(self, piece: Piece) -> dict[str, Tensor]:
        """The live z (`fast`), x (the average), second moment and numbers of a piece."""
        return dict(self._states[piece.name])
