"""Muon: updates hidden matrices by orthogonalised momentum and everything else by AdamW."""

from typing import TYPE_CHECKING, Any, ClassVar

from mplug import Optimizer, Piece, UsageError, hookimpl, listed
from mplug_muon.config import MuonConfig

if TYPE_CHECKING:
    from mplug import Assembler, Model


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
    def shard_model(self, model: "Model") -> None:
        """Refuse items of axes that no matrix of the model has along its rows; no placement changes."""
        rows = {segment.axis for one in model.placements.values() if len(one.dims) > 1 for segment in one.dims[-2]}
        if unknown := [name for name in self.config.separate if name not in rows]:
            raise UsageError(
                f"optimizer.separate: no matrix of the model has rows along the axis '{unknown[0]}'; the axes of rows "
                f"are {listed(sorted(rows))}"
            )

    @hookimpl
    def build_optimizer(self, pieces: list[Piece], assembler: "Assembler") -> Optimizer:
        """An optimizer of these pieces."""
        from mplug_muon.both import MuonAndAdamW

        return MuonAndAdamW(pieces, assembler, self.config)
