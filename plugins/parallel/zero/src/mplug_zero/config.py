"""The config of ZeRO."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from mplug import MAY_CHANGE


class ZeROConfig(BaseModel):
    """What is divided, and how it travels."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    stage: Annotated[Literal[1, 2], MAY_CHANGE] = Field(
        1, description="1 divides masters and optimizer state, 2 gradients too"
    )
    bucket_mib: Annotated[float, MAY_CHANGE] = Field(32.0, gt=0, description="size of a bucket of fp32 gradients")
    reduce_dtype: Literal["fp32", "bf16"] = Field(
        "fp32", description="the precision in which gradients travel and are summed over ranks"
    )
    overlap: Annotated[bool, MAY_CHANGE] = Field(
        True, description="sum gradients while backward runs, and gather weights while the next forward does"
    )
