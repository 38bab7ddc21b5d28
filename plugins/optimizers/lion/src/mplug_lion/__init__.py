"""Lion (arXiv 2302.06675) over pieces: every weight moves by the same amount, in the direction of its momentum."""

from pydantic import BaseModel, ConfigDict, Field

from mplug import Optimizer, Piece, hookimpl


class Lion:
    """Descent by the sign of interpolated momentum, with decoupled weight decay."""

    class Config(BaseModel):
        """Learning rate, decay and the two rates of momentum."""

        model_config = ConfigDict(extra="forbid", frozen=True)

        lr: float = Field(1e-4, gt=0, allow_inf_nan=False, description="peak learning rate; the schedule scales it")
        weight_decay: float = Field(
            1.0, ge=0, allow_inf_nan=False, description="decoupled decay of parameters of two dimensions and more"
        )
        beta1: float = Field(0.9, ge=0, lt=1, description="share of the momentum in the direction of a step")
        beta2: float = Field(0.99, ge=0, lt=1, description="decay rate of the momentum")

    def __init__(self, config: Config) -> None:
        self.config = config

    @hookimpl
    def build_optimizer(self, pieces: list[Piece]) -> Optimizer:
        """An optimizer of these pieces."""
        from mplug_lion.foreach import ForeachLion

        return ForeachLion(pieces, self.config)
