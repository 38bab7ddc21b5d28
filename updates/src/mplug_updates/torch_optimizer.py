"""One of torch's fused optimizers as an optimizer of pieces, on any device and without Triton."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from mplug.contracts.optimizer import Optimizer, Piece, StepScalars


class TorchOptimizer(Optimizer):
    """One fused pass of torch over all pieces. It updates masters only; the host casts them to the weights.

    `build` makes torch's optimizer, with `fused=True`, from one group of parameters without weight decay. `state`
    returns the state of a piece before the first step, which torch's optimizer then updates in place. Torch reads the
    decay as a number, which would make the CPU wait for the device. So `decay` applies it in a pass before torch's.
    """

    def __init__(
        self,
        pieces: list[Piece],
        build: Callable[[list[dict[str, Any]]], torch.optim.Optimizer],
        state: Callable[[Piece], dict[str, Tensor]],
    ) -> None:
        parameters = {piece.name: nn.Parameter(piece.master) for piece in pieces}
        self.decayed = [piece for piece in pieces if piece.parameter.decays]
        self._torch = build([{"params": list(parameters.values()), "weight_decay": 0.0}])
        self._states: dict[str, dict[str, Tensor]] = {}
        for piece in pieces:
            parameters[piece.name].grad = piece.gradient
            self._states[piece.name] = self._torch.state[parameters[piece.name]] = state(piece)

    def step(self, scalars: StepScalars) -> None:
        """Update every piece's master once; torch scales gradients in place."""
        if self.decayed:
            self.decay(scalars)
        (group,) = self._torch.param_groups
        if "capturable" in group:  # torch refuses to be recorded without it, and warns of it at other times
            group["capturable"] = scalars.lr.is_cuda and torch.cuda.is_current_stream_capturing()
        group["lr"] = scalars.lr
        self._torch.grad_scale = scalars.scale.reciprocal()  # type: ignore[attr-defined]  # torch's gradient scaler's
        self._torch.found_inf = scalars.skip  # type: ignore[attr-defined]
        self._torch.step()

    def decay(self, scalars: StepScalars) -> None:
        """Apply decoupled decay to the masters of `decayed`; in a skipped step, the factor is exactly 1."""
        masters = [piece.master for piece in self.decayed]
        factor = 1 - scalars.lr.double() * scalars.weight_decay.double()  # on a CPU, torch's own is in fp64 too
        torch._foreach_mul_(masters, factor.masked_fill(scalars.skip > 0, 1.0).to(masters[0].dtype))

    def state(self, piece: Piece) -> dict[str, Tensor]:
        """The live state of a piece."""
        return dict(self._states[piece.name])
