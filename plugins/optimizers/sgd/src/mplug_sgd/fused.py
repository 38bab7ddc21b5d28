"""Torch's fused SGD as an optimizer of pieces."""

from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn

from mplug import Piece, StepScalars

if TYPE_CHECKING:
    from mplug_sgd.config import SGDConfig


class FusedSGD:
    """One fused pass over all pieces; it scales and skips by the protocol of torch's gradient scaler."""

    needs: Literal["elements"] = "elements"

    def __init__(self, pieces: list[Piece], config: "SGDConfig") -> None:
        self._decoupled = config.decoupled_weight_decay
        self._decayed = [piece.master for piece in pieces if piece.parameter.decays]
        parameters = {piece.name: nn.Parameter(piece.master) for piece in pieces}
        decayed, plain = ([parameters[p.name] for p in pieces if p.parameter.decays is on] for on in (True, False))
        self._torch = torch.optim.SGD(
            [{"params": decayed}, {"params": plain, "weight_decay": 0.0}],
            lr=config.lr,
            momentum=config.momentum,
            nesterov=config.nesterov,
            fused=True,
        )
        self._states: dict[str, dict[str, Tensor]] = {}
        for piece in pieces:
            velocity = {"momentum_buffer": torch.zeros_like(piece.master)} if config.momentum else {}
            parameters[piece.name].grad = piece.gradient
            self._states[piece.name] = self._torch.state[parameters[piece.name]] = velocity

    def step(self, scalars: StepScalars) -> None:
        """Update every piece's master once; torch scales gradients in place."""
        decayed, plain = self._torch.param_groups
        decayed["lr"] = plain["lr"] = scalars.lr
        if self._decoupled:
            self._decay(scalars)
        else:
            decayed["weight_decay"] = scalars.weight_decay
        self._torch.grad_scale = scalars.scale.reciprocal()  # type: ignore[attr-defined]
        self._torch.found_inf = scalars.skip  # type: ignore[attr-defined]
        self._torch.step()

    def _decay(self, scalars: StepScalars) -> None:
        """Apply decoupled decay to masters; in a skipped step, the factor is exactly 1."""
        if self._decayed:
            factor = (1 - scalars.lr * scalars.weight_decay).masked_fill(scalars.skip > 0, 1.0)
            torch._foreach_mul_(self._decayed, factor)

    def state(self, piece: Piece) -> dict[str, Tensor]:
        """The live velocity of a piece, if there is momentum."""
        return dict(self._states[piece.name])
