"""Muon over pieces: updates hidden matrices by orthogonalised momentum and everything else by AdamW."""

from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict, Field

from mplug import Optimizer, Piece, hookimpl

if TYPE_CHECKING:
    from mplug import Run


class Muon:
    """Muon (kellerjordan.github.io/posts/muon; arXiv 2502.16982), which needs whole matrices."""

    class Config(BaseModel):
        """Learning rates, decay, momentum, and the parameters that AdamW updates."""

        model_config = ConfigDict(extra="forbid", frozen=True)

        lr: float = Field(
            1e-3, gt=0, allow_inf_nan=False, description="peak learning rate of hidden matrices; the schedule scales it"
        )
        weight_decay: float = Field(
            0.1, ge=0, allow_inf_nan=False, description="decoupled decay of parameters of two dimensions and more"
        )
        momentum: float = Field(0.95, ge=0, lt=1, description="decay rate of the momentum of hidden matrices")
        nesterov: bool = Field(True, description="orthogonalise the momentum as this gradient once more would leave it")
        scale: Literal["original", "match_rms_adamw"] = Field(
            "match_rms_adamw",
            description="factor of a matrix's update: original sqrt(max(1, rows / columns)), match_rms_adamw "
            "0.2 sqrt(max(rows, columns)), with which rates and decays of AdamW serve",
        )
        num_iterations: int = Field(5, ge=1, le=20, description="Newton-Schulz iterations")
        tables: tuple[str, ...] = Field(
            ("vocab", "positions"),
            description="named axes of the plan whose parameters are look-up tables and output heads: AdamW's",
        )
        adamw_lr: float | None = Field(
            None, gt=0, allow_inf_nan=False, description="AdamW's peak learning rate, scheduled like lr; null: lr"
        )
        adamw_beta1: float = Field(0.9, ge=0, lt=1, description="decay rate of AdamW's first moment")
        adamw_beta2: float = Field(0.95, ge=0, lt=1, description="decay rate of AdamW's second moment")
        adamw_eps: float = Field(
            1e-8, gt=0, allow_inf_nan=False, description="added to the root of AdamW's second moment"
        )

    def __init__(self, config: Config) -> None:
        self.config = config

    @hookimpl
    def build_optimizer(self, run: "Run", pieces: list[Piece]) -> Optimizer:
        """An optimizer of these pieces."""
        from mplug_muon.both import MuonAndAdamW

        return MuonAndAdamW(pieces, run.rank, self.config)
