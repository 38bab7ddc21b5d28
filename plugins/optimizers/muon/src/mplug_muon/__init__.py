"""Muon: updates hidden matrices by orthogonalised momentum and everything else by AdamW."""

from typing import TYPE_CHECKING, Any, ClassVar

from mplug import Optimizer, Piece, hookimpl
from mplug_muon.config import MuonConfig

if TYPE_CHECKING:
    from mplug import Assembler


class Muon:
    """Muon (kellerjordan.github.io/posts/muon; arXiv 2502.16982), under every layout."""

    Config = MuonConfig

    fine_tuning: ClassVar[dict[str, dict[str, Any]]] = {"optimizer": {"lr": 2e-5, "weight_decay": 0.0}}
    """A fiftieth of the default rate, as the host's default for AdamW; not measured."""

    captures = True
    """The number of updates and everything else that changes is on the device."""

    def __init__(self, config: Config) -> None:
        self.config = config

    @hookimpl
    def build_optimizer(self, pieces: list[Piece], assembler: "Assembler") -> Optimizer:
        """An optimizer of these pieces."""
        from mplug_muon.both import MuonAndAdamW

        return MuonAndAdamW(pieces, assembler, self.config)
