"""The config of AdamW."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class AdamWConfig(BaseModel):
    """Learning rate, decay and moments."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    lr: float = Field(1e-3, gt=0, allow_inf_nan=False, description="peak learning rate; the schedule scales it")
    weight_decay: float = Field(
        0.1, ge=0, allow_inf_nan=False, description="decoupled decay of parameters with at least two dimensions"
    )
    beta1: float = Field(0.9, ge=0, lt=1, description="decay rate of the first moment")
    beta2: float = Field(0.95, ge=0, lt=1, description="decay rate of the second moment")
    eps: float = Field(1e-8, gt=0, allow_inf_nan=False, description="added to the square root of the second moment")
    moments: Literal["masters", "bf16", "8bit"] = Field(
        "masters",
        description="format of both moments: masters: that of the master weights; bf16: rounded stochastically, which "
        "saves half of the memory of fp32 moments; 8bit: codes with a scale per row and per column, which saves three "
        "quarters, for matrices",
    )
