"""The config of DiLoCo."""

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

Wire = Literal["full", "bf16", "int8", "int4"]
"""The formats in which differences travel; `full` is that of the master weights."""


class DiLoCoConfig(BaseModel):
    """When workers exchange their progress, in which format, and the outer optimizer."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    every: int = Field(100, ge=1, description="steps between two exchanges of the same parameter")
    fragments: int = Field(
        1, ge=1, description="number of parts of the model, each of which is exchanged at a step of its own"
    )
    delay: int = Field(
        0, ge=0, description="steps during which an exchange is under way, before the local weights receive the result"
    )
    alpha: float = Field(
        0.0, ge=0, lt=1, description="weight of the local weights when they receive the global ones: a l + (1 - a) g"
    )
    lr: float = Field(0.7, gt=0, description="learning rate of the outer optimizer, SGD with Nesterov momentum")
    momentum: float = Field(0.9, ge=0, lt=1, description="momentum of the outer optimizer")
    wire: Wire = Field(
        "full", description="format in which differences travel: full (that of the master weights), bf16, int8 or int4"
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.every % self.fragments:
            raise ValueError(
                f"fragments={self.fragments} does not divide every={self.every}; fragments are exchanged at equal "
                f"distances"
            )
        if self.delay >= self.every // self.fragments:
            raise ValueError(
                f"delay={self.delay} must be less than every / fragments = {self.every // self.fragments}: one "
                f"fragment is under way at a time"
            )
        return self
