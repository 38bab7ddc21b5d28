"""The config of SGD."""

from pydantic import BaseModel, ConfigDict, Field, model_validator


class SGDConfig(BaseModel):
    """Learning rate, momentum and decay."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    lr: float = Field(0.1, gt=0, allow_inf_nan=False, description="peak learning rate; the schedule scales it")
    weight_decay: float = Field(
        0.0, ge=0, allow_inf_nan=False, description="decay of parameters with at least two dimensions"
    )
    momentum: float = Field(0.9, ge=0, lt=1, description="decay rate of the velocity; 0: no momentum and no state")
    nesterov: bool = Field(False, description="Nesterov momentum; requires a momentum greater than 0")
    decoupled_weight_decay: bool = Field(
        False,
        description="true: decay weights directly (arXiv 1711.05101); false: add the gradient of an L2 penalty, which "
        "then enters the momentum",
    )

    @model_validator(mode="after")
    def _needs_momentum(self) -> "SGDConfig":
        if self.nesterov and not self.momentum:
            raise ValueError(
                "nesterov=true requires momentum, which is 0; set a momentum greater than 0, or nesterov=false"
            )
        return self
