"""Stochastic gradient descent over pieces, with momentum and Nesterov's look-ahead."""

from typing import Any, ClassVar

from mplug import Optimizer, Piece, hookimpl
from mplug_sgd.config import SGDConfig


class SGD:
    """Stochastic gradient descent as in torch.optim.SGD: velocity b <- momentum b + g, then w <- w - lr b."""

    Config = SGDConfig

    fine_tuning: ClassVar[dict[str, dict[str, Any]]] = {"optimizer": {"lr": 2e-3}}
    """A fiftieth of the default rate, as the host's default for AdamW; not measured."""

    captures = True
    """The number of updates and everything else that changes is on the device."""

    def __init__(self, config: Config) -> None:
        self.config = config

    @hookimpl
    def build_optimizer(self, pieces: list[Piece]) -> Optimizer:
        """An optimizer of these pieces."""
        from mplug_sgd.fused import FusedSGD

        return FusedSGD(pieces, self.config)
