"""Torch's fused AdamW, for the pieces that are not hidden matrices."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from mplug import Piece, StepScalars

if TYPE_CHECKING:
    from mplug_muon.config import MuonConfig


class FusedAdamW:
    """One fused pass over these pieces; it scales and skips by the protocol of torch's gradient scaler."""

    def __init__(self, pieces: list[Piece], config: "MuonConfig") -> None:
        self._lr_ratio = 1.0 if config.adamw_lr is None else config.adamw_lr / config.lr
        parameters = {piece.name: nn.Parameter(piece.master) for piece in pieces}
        decayed, plain = ([parameters[p.name] for p in pieces if p.parameter.decays is on] for on in (True, False))
        self._torch = torch.optim.AdamW(
            [{"params": decayed}, {"params": plain, "weight_decay": 0.0}],
            lr=torch.tensor(config.lr),
            betas=(config.adamw_beta1, config.adamw_beta2),
            eps=config.adamw_eps,
            fused=True,
        )
        self._states: dict[str, dict[str, Tensor]] = {}
        for piece in pieces:
            state = {
                "step": torch.zeros((), device=piece.master.device),
                "exp_avg": torch.zeros_like(piece.master),
                "exp_avg_sq": torch.zeros_like(piece.master),
            }
            parameters[piece.name].grad = piece.gradient
            self._states[piece.name] = self._torch.state[parameters[piece.name]] = state

    def step(self, scalars: StepScalars) -> None:
        """Update every piece's master once; torch scales gradients in place."""
        decayed, plain = self._torch.param_groups
        decayed["lr"] = plain["lr"] = scalars.lr * self._lr_ratio
        decayed["weight_decay"] = scalars.weight_decay
        self._torch.grad_scale = scalars.scale.reciprocal()  # type: ignore[attr-defined]
        self._torch.found_inf = scalars.skip  # type: ignore[attr-defined]
        self._torch.step()

    def state(self, piece: Piece) -> dict[str, Tensor]:
        """The live moments and step count of a piece."""
        return dict(self._states[piece.name])
