"""Adafactor (arXiv 1804.04235): the second moment of a matrix is kept as means over its rows and its columns."""

from typing import TYPE_CHECKING, Any, ClassVar

from mplug import Optimizer, Piece, hookimpl
from mplug_adafactor.config import AdafactorConfig

if TYPE_CHECKING:
    from mplug import Assembler


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
    def build_optimizer(self, pieces: list[Piece], assembler: "Assembler") -> Optimizer:
        """An optimizer of these pieces."""
        from mplug_adafactor.factored import FactoredMoments

        return FactoredMoments(pieces, assembler, self.config)
