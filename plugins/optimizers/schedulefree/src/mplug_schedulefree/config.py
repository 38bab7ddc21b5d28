"""The config of schedule-free AdamW."""

from pydantic import BaseModel, ConfigDict, Field


class ScheduleFreeConfig(BaseModel):
    """Learning rate, decay, and the rates of averages."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    lr: float = Field(2.5e-3, gt=0, allow_inf_nan=False, description="learning rate after the warm-up")
    weight_decay: float = Field(
        0.1, ge=0, allow_inf_nan=False, description="decoupled decay of parameters with at least two dimensions"
    )
    beta1: float = Field(
        0.9, gt=0, lt=1, description="share of the average in the weights at which gradients are computed"
    )
    beta2: float = Field(0.999, ge=0, lt=1, description="decay rate of the second moment")
    eps: float = Field(1e-8, gt=0, allow_inf_nan=False, description="added to the square root of the second moment")
    power: float = Field(
        0.0, ge=0, allow_inf_nan=False, description="power of the number of a step in its weight in the average"
    )
    lr_power: float = Field(
        2.0, ge=0, allow_inf_nan=False, description="power of the largest learning rate so far in a step's weight"
    )
