"""Torch's fused AdamW as an optimizer of pieces, on any device and without Triton."""

from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn

from mplug import Piece, StepScalars
from mplug_adamw.state import States

if TYPE_CHECKING:
    from mplug_adamw.config import AdamWConfig


class FusedAdamW:
    """One fused pass over all pieces; it scales gradients and skips steps by the protocol of torch's gradient scaler.

    It updates masters only; the host casts them to the weights.
    """

    needs: Literal["elements"] = "elements"

    def __init__(self, pieces: list[Piece], config: "AdamWConfig") -> None:
        self._states = States(pieces)
        parameters = {piece.name: nn.Parameter(piece.master) for piece in pieces}
        for piece in pieces:
            parameters[piece.name].grad = piece.gradient
        decayed, plain = ([parameters[p.name] for p in pieces if p.parameter.decays is on] for on in (True, False))
        self._torch = torch.optim.AdamW(
            [{"params": decayed}, {"params": plain, "weight_decay": 0.0}],
            lr=torch.tensor(config.lr),
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            weight_decay=config.weight_decay,
            fused=True,
        )
        for piece in pieces:
            self._torch.state[parameters[piece.name]] = self._states.of(piece)

    def step(self, scalars: StepScalars) -> None:
        """Update every piece's master once; torch scales gradients in place."""
        decayed, plain = self._torch.param_groups
        decayed["lr"] = plain["lr"] = scalars.lr
        decayed["weight_decay"] = scalars.weight_decay
        self._torch.grad_scale = scalars.scale.reciprocal()  # type: ignore[attr-defined]
        self._torch.found_inf = scalars.skip  # type: ignore[attr-defined]
        self._torch.step()

    def state(self, piece: Piece) -> dict[str, Tensor]:
        """The live moments and step count of a piece."""
        return self._states.of(piece)
