"""The config of Lion."""

from pydantic import BaseModel, ConfigDict, Field


class LionConfig(BaseModel):
    """Learning rate, decay and the two rates of momentum."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    lr: float = Field(1e-4, gt=0, allow_inf_nan=False, description="peak learning rate; the schedule scales it")
    weight_decay: float = Field(
        1.0, ge=0, allow_inf_nan=False, description="decoupled decay of parameters with at least two dimensions"
    )
    beta1: float = Field(0.9, ge=0, lt=1, description="weight of the momentum in the direction of a step")
    beta2: float = Field(0.99, ge=0, lt=1, description="decay rate of the momentum")
