"""AdamW (arXiv 1711.05101) over pieces: in one pass over memory on a GPU, by torch's implementation elsewhere."""

from pydantic import BaseModel, ConfigDict, Field

from mplug import Optimizer, Piece, hookimpl


class AdamW:
    """Adam with decoupled weight decay."""

    class Config(BaseModel):
        """Learning rate, decay and moments."""

        model_config = ConfigDict(extra="forbid", frozen=True)

        lr: float = Field(1e-3, gt=0, allow_inf_nan=False, description="peak learning rate; the schedule scales it")
        weight_decay: float = Field(
            0.1, ge=0, allow_inf_nan=False, description="decoupled decay of parameters of two dimensions and more"
        )
        beta1: float = Field(0.9, ge=0, lt=1, description="decay rate of the first moment")
        beta2: float = Field(0.95, ge=0, lt=1, description="decay rate of the second moment")
        eps: float = Field(1e-8, gt=0, allow_inf_nan=False, description="added to the root of the second moment")

    def __init__(self, config: Config) -> None:
        self.config = config

    @hookimpl
    def build_optimizer(self, pieces: list[Piece]) -> Optimizer:
        """An optimizer of these pieces."""
        from mplug_adamw.choice import optimizer_of

        return optimizer_of(pieces, self.config)
