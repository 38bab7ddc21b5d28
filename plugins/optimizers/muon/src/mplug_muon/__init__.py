"""Muon: updates hidden matrices by orthogonalised momentum and everything else by AdamW."""

from typing import TYPE_CHECKING, Any, ClassVar

from mplug import Optimizer, Piece, UsageError, hookimpl, listed
from mplug_muon.config import MuonConfig

if TYPE_CHECKING:
    from mplug import Assembler, Model, Parameter, Run
    from mplug_muon.clip import Clipped


class Muon:
    """Muon (kellerjordan.github.io/posts/muon; arXiv 2502.16982), under every layout."""

    Config = MuonConfig

    fine_tuning: ClassVar[dict[str, dict[str, Any]]] = {"optimizer": {"lr": 2e-5, "weight_decay": 0.0}}
    """A fiftieth of the default rate, as the host's default for AdamW; not measured."""

    captures = True
    """The number of updates and everything else that changes is on the device."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self._clipped: dict[str, list[Clipped]] = {}

    @hookimpl
    def adapt_model(self, run: "Run", model: "Model") -> None:
        """Let attention keep its largest logits, if they are bounded."""
        if self.config.qk_clip is not None and run.trains:
            from mplug_muon.clip import attach_statistics

            self._clipped = attach_statistics(model)

    @hookimpl
    def shard_model(self, run: "Run", model: "Model") -> None:
        """Refuse what cannot be clipped, and items of axes that no matrix has along its rows; no placement changes."""
        if self.config.qk_clip is not None:
            from mplug_muon.clip import FIELD, refuse_unclipped

            if not self._clipped:
                raise UsageError(f"{FIELD} applies to the optimizer of the run only; remove it from optimizer.groups")
            refuse_unclipped(run, model, self._clipped)
        rows = {segment.axis for one in model.placements.values() if len(one.dims) > 1 for segment in one.dims[-2]}
        if unknown := [name for name in self.config.separate if name not in rows]:
            raise UsageError(
                f"optimizer.separate: no matrix of the model has rows along the axis '{unknown[0]}'; the axes of rows "
                f"are {listed(sorted(rows))}"
            )

    @hookimpl
    def rate_of_width(self, parameter: "Parameter") -> float | None:
        """1 for hidden matrices, whose orthogonalised updates have the size of the shape alone; Adam's for others.

        The size that transfers is sqrt(outputs / inputs) (arXiv 2310.17813, condition 1).
        """
        from mplug_muon.routing import is_hidden_matrix

        if self.config.scale != "unit_rms_norm":
            raise UsageError(
                f"optimizer.scale={self.config.scale} of optimizers/muon does not transfer to other widths "
                f"(model.mup_base); set optimizer.scale=unit_rms_norm, or remove model.mup_base"
            )
        if parameter.widths is None:
            return None
        return 1.0 if is_hidden_matrix(parameter, self.config.tables) else 1 / parameter.widths.inputs

    @hookimpl
    def build_optimizer(self, pieces: list[Piece], assembler: "Assembler") -> Optimizer:
        """An optimizer of these pieces."""
        from mplug_muon.both import MuonAndAdamW

        return MuonAndAdamW(pieces, assembler, self.config, self._clipped)
