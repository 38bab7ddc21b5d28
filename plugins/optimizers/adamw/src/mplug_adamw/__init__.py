"""AdamW (arXiv 1711.05101) over pieces: in one pass over memory on a GPU, by torch's implementation elsewhere."""

from typing import TYPE_CHECKING

from mplug import Optimizer, Piece, hookimpl
from mplug_adamw.config import AdamWConfig

if TYPE_CHECKING:
    from mplug import Assembler, Parameter, Run


class AdamW:
    """Adam with decoupled weight decay."""

    Config = AdamWConfig

    captures = True
    """The number of updates and everything else that changes is on the device."""

    def __init__(self, config: Config) -> None:
        self.config = config

    @hookimpl
    def rate_of_width(self, parameter: "Parameter") -> float | None:
        """Elements of updates have a size of their own, as Adam's (arXiv 2203.03466, table 8)."""
        return None if parameter.widths is None else 1 / parameter.widths.inputs

    @hookimpl
    def build_optimizer(self, run: "Run", pieces: list[Piece], assembler: "Assembler") -> Optimizer:
        """An optimizer of these pieces."""
        if self.config.moments == "8bit":
            from mplug_adamw.quantized import QuantizedAdamW

            return QuantizedAdamW(pieces, assembler, self.config)
        if self.config.moments == "bf16":
            from mplug_adamw.rounded import RoundedAdamW

            return RoundedAdamW(run, pieces, self.config)
        from mplug_adamw.implementation import optimizer_of

        return optimizer_of(pieces, self.config)
