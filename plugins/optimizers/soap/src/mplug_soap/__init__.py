"""SOAP (arXiv 2409.11321): Adam in the eigenbasis of Shampoo's factors, for hidden matrices; AdamW for the rest."""

from typing import TYPE_CHECKING, Any, ClassVar

from mplug import Optimizer, Piece, hookimpl
from mplug_soap.config import SOAPConfig

if TYPE_CHECKING:
    from mplug import Assembler


class SOAP:
    """Adam in a basis that follows the gradients' covariances, under every layout."""

    Config = SOAPConfig

    fine_tuning: ClassVar[dict[str, dict[str, Any]]] = {"optimizer": {"lr": 2e-5, "weight_decay": 0.0}}
    """A fiftieth of the default rate, as the host's default for AdamW; not measured."""

    captures = "refreshes bases in steps that it chooses by their number, on the CPU"

    def __init__(self, config: Config) -> None:
        self.config = config

    @hookimpl
    def build_optimizer(self, pieces: list[Piece], assembler: "Assembler") -> Optimizer:
        """An optimizer of these pieces."""
        from mplug_soap.both import SOAPAndAdamW

        return SOAPAndAdamW(pieces, assembler, self.config)
