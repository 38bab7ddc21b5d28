"""One of torch's fused optimizers as an optimizer of pieces, on any device and without Triton."""

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from mplug.contracts import Piece, StepScalars


class TorchOptimizer:
    """One fused pass of torch over all pieces. It updates masters only; the host casts them to the weights.

    `build` makes torch's optimizer, with `fused=True`, from two groups of parameters: those that decay, and the others.
    `state` returns the state of a piece before the first step, which torch's optimizer then updates in place.
    """

    needs: Literal["elements"] = "elements"

    def __init__(
        self,
        pieces: list[Piece],
        build: Callable[[list[dict[str, Any]]], torch.optim.Optimizer],
        state: Callable[[Piece], dict[str, Tensor]],
    ) -> None:
        parameters = {piece.name: nn.Parameter(piece.master) for piece in pieces}
        decayed, plain = ([parameters[p.name] for p in pieces if p.parameter.decays is on] for on in (True, False))
        self._torch = build([{"params": decayed}, {"params": plain, "weight_decay": 0.0}])
        self._states: dict[str, dict[str, Tensor]] = {}
        for piece in pieces:
            parameters[piece.name].grad = piece.gradient
            self._states[piece.name] = self._torch.state[parameters[piece.name]] = state(piece)

    def step(self, scalars: StepScalars) -> None:
        """Update every piece's master once; torch scales gradients in place."""
        decayed, plain = self._torch.param_groups
        for group in self._torch.param_groups:
            if "capturable" in group:  # torch refuses to be recorded without it, and warns of it at other times
                group["capturable"] = scalars.lr.is_cuda and torch.cuda.is_current_stream_capturing()
        decayed["lr"] = plain["lr"] = scalars.lr
        decayed["weight_decay"] = scalars.weight_decay
        self._torch.grad_scale = scalars.scale.reciprocal()  # type: ignore[attr-defined]  # torch's gradient scaler's
        self._torch.found_inf = scalars.skip  # type: ignore[attr-defined]
        self._torch.step()

    def state(self, piece: Piece) -> dict[str, Tensor]:
        """The live state of a piece."""
        return dict(self._states[piece.name])
