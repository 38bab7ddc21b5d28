"""Lion (arXiv 2302.06675) over pieces: every weight moves by the same amount, in the direction of its momentum."""

from typing import TYPE_CHECKING, Any, ClassVar

from mplug import Optimizer, Piece, hookimpl
from mplug_lion.config import LionConfig

if TYPE_CHECKING:
    from mplug import Parameter


class Lion:
    """Descent by the sign of interpolated momentum, with decoupled weight decay."""

    Config = LionConfig

    fine_tuning: ClassVar[dict[str, dict[str, Any]]] = {"optimizer": {"lr": 2e-6, "weight_decay": 0.0}}
    """A fiftieth of the default rate, as the host's default for AdamW; not measured."""

    captures = True
    """The number of updates and everything else that changes is on the device."""

    def __init__(self, config: Config) -> None:
        self.config = config

    @hookimpl
    def rate_of_width(self, parameter: "Parameter") -> float | None:
        """Elements of updates have a size of their own, as Adam's (arXiv 2203.03466, table 8)."""
        return None if parameter.widths is None else 1 / parameter.widths.inputs

    @hookimpl
    def build_optimizer(self, pieces: list[Piece]) -> Optimizer:
        """An optimizer of these pieces."""
        from mplug_lion.foreach import ForeachLion

        return ForeachLion(pieces, self.config)
