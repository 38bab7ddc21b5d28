"""Stochastic gradient descent over pieces, with momentum and Nesterov's look-ahead."""

from typing import TYPE_CHECKING, Any, ClassVar

from mplug import Optimizer, Piece, UsageError, hookimpl
from mplug_sgd.config import SGDConfig

if TYPE_CHECKING:
    from mplug import Parameter


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
    def rate_of_width(self, parameter: "Parameter") -> float | None:
        """Updates are as large as gradients, which fall with the outputs (arXiv 2203.03466, table 8)."""
        if self.config.weight_decay and not self.config.decoupled_weight_decay:
            raise UsageError(
                "optimizer.weight_decay is part of the gradients of optimizers/sgd, and is not known to transfer to "
                "other widths (model.mup_base); set optimizer.decoupled_weight_decay=true, or optimizer.weight_decay=0"
            )
        return None if parameter.widths is None else parameter.widths.outputs / parameter.widths.inputs

    @hookimpl
    def build_optimizer(self, pieces: list[Piece]) -> Optimizer:
        """An optimizer of these pieces."""
        from mplug_sgd.fused import FusedSGD

        return FusedSGD(pieces, self.config)
