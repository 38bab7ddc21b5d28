"""The config of SOAP."""

from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from mplug import distinct


class SOAPConfig(BaseModel):
    """Learning rate, decay, moments, factors, and the parameters that AdamW updates."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    lr: float = Field(1e-3, gt=0, allow_inf_nan=False, description="peak learning rate; the schedule scales it")
    weight_decay: float = Field(
        0.1, ge=0, allow_inf_nan=False, description="decoupled decay of parameters with at least two dimensions"
    )
    beta1: float = Field(0.95, ge=0, lt=1, description="decay rate of the first moment")
    beta2: float = Field(0.95, ge=0, lt=1, description="decay rate of the second moment")
    eps: float = Field(1e-8, gt=0, allow_inf_nan=False, description="added to the square root of the second moment")
    factor_beta: float = Field(0.95, ge=0, lt=1, description="decay rate of the factors (covariances of gradients)")
    refresh_every: int = Field(10, ge=1, description="number of steps between refreshes of the bases")
    shift: float = Field(
        1e-3,
        ge=0,
        lt=1,
        description="share of its mean eigenvalue that is added to a factor in a power step, so that the basis of a "
        "factor of low rank does not depend on rounding; 0: as published",
    )
    largest_factor: int = Field(
        8192, ge=1, description="a side of a matrix that is longer has no factor, and keeps the standard basis"
    )
    tables: Annotated[tuple[str, ...], AfterValidator(distinct)] = Field(
        ("vocab", "positions", "token_types", "ranges", "conv"),
        description="named axes of look-up tables, output heads and short convolutions, whose rows are separate "
        "vectors; AdamW updates the parameters with these axes",
    )
