"""Muon (Jordan et al. 2024): orthogonalised momentum for matrices, Adam for vectors and look-up tables."""

from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, Field

from mplug import Piece, hookimpl

if TYPE_CHECKING:
    from mplug import Assembler
    from nova_orthon.muon import Muon


class Orthon:
    """Muon, which needs whole matrices and has them from the host."""

    class Config(BaseModel):
        """Learning rate, decay and momenta."""

        model_config = ConfigDict(extra="forbid", frozen=True)

        lr: float = Field(1e-3, gt=0, allow_inf_nan=False, description="peak learning rate; the schedule scales it")
        weight_decay: float = Field(
            0.1, ge=0, allow_inf_nan=False, description="decoupled decay of parameters of two dimensions and more"
        )
        momentum: float = Field(0.95, ge=0, lt=1, description="decay rate of the momentum of matrices")
        rms: float = Field(0.2, gt=0, description="root mean square of a matrix's update at a learning rate of 1")
        tables: tuple[str, ...] = Field(
            ("vocab", "positions"), description="named axes of look-up tables, which are updated by Adam"
        )
        beta1: float = Field(0.9, ge=0, lt=1, description="decay rate of Adam's first moment")
        beta2: float = Field(0.95, ge=0, lt=1, description="decay rate of Adam's second moment")
        eps: float = Field(1e-8, gt=0, allow_inf_nan=False, description="added to the root of Adam's second moment")

    def __init__(self, config: Config) -> None:
        self.config = config

    @hookimpl
    def build_optimizer(self, pieces: list[Piece], assembler: "Assembler") -> "Muon":
        """An optimizer of these pieces."""
        from nova_orthon.muon import Muon

        return Muon(pieces, assembler, self.config)
