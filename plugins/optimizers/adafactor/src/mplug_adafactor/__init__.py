"""Adafactor (arXiv 1804.04235): the second moment of a matrix is kept as means over its rows and its columns."""

from typing import TYPE_CHECKING, Any, ClassVar

from mplug import Optimizer, Piece, UsageError, hookimpl
from mplug_adafactor.config import AdafactorConfig

if TYPE_CHECKING:
    from mplug import Assembler, Parameter


class Adafactor:
    """Adam's second moment in the memory of a row and a column, with clipped updates, under every layout."""

    Config = AdafactorConfig

    fine_tuning: ClassVar[dict[str, dict[str, Any]]] = {"optimizer": {"lr": 2e-5, "weight_decay": 0.0}}
    """A fiftieth of the default rate, as the host's default for AdamW; not measured."""

    captures = True
    """The number of updates and everything else that changes is on the device."""

    def __init__(self, config: Config) -> None:
        self.config = config

    @hookimpl
    def rate_of_width(self, parameter: "Parameter") -> float | None:
        """Elements of updates have a size of their own, as Adam's (arXiv 2203.03466, table 8)."""
        if self.config.scale_parameter:
            raise UsageError(
                "optimizer.scale_parameter multiplies rates by the size of weights, and is not known to transfer to "
                "other widths (model.mup_base); set optimizer.scale_parameter=false, or remove model.mup_base"
            )
        return None if parameter.widths is None else 1 / parameter.widths.inputs

    @hookimpl
    def build_optimizer(self, pieces: list[Piece], assembler: "Assembler") -> Optimizer:
        """An optimizer of these pieces."""
        from mplug_adafactor.factored import FactoredMoments

        return FactoredMoments(pieces, assembler, self.config)
