"""The config of Adafactor."""

from pydantic import BaseModel, ConfigDict, Field


class AdafactorConfig(BaseModel):
    """Learning rate, decay, moments and clipping."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    lr: float = Field(1e-3, gt=0, allow_inf_nan=False, description="peak learning rate; the schedule scales it")
    weight_decay: float = Field(
        0.0, ge=0, allow_inf_nan=False, description="decoupled decay of parameters with at least two dimensions"
    )
    scale_parameter: bool = Field(
        False, description="multiply the learning rate of a matrix by the root mean square of its weights"
    )
    least_scale: float = Field(
        1e-3, gt=0, allow_inf_nan=False, description="least root mean square that scale_parameter multiplies by"
    )
    decay_rate: float = Field(
        0.8, gt=0, allow_inf_nan=False, description="update t keeps 1 - t^(-decay_rate) of the second moment"
    )
    beta1: float | None = Field(
        None, ge=0, lt=1, description="decay rate of the first moment; null: no first moment and no memory for it"
    )
    clip: float = Field(
        1.0, gt=0, allow_inf_nan=False, description="largest root mean square of a matrix's update before the rate"
    )
    eps: float = Field(1e-30, gt=0, allow_inf_nan=False, description="added to the square of every gradient")
