"""The config of ZeRO."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from mplug import MAY_CHANGE, SumFormat

Over = Literal["zero", "data"]


class ZeROConfig(BaseModel):
    """Which data ZeRO shards, and how gradients and weights are communicated."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    stage: Annotated[Literal[1, 2], MAY_CHANGE] = Field(
        1, description="1: shard master weights and optimizer state; 2: shard gradients too"
    )
    over: Annotated[Over, MAY_CHANGE] = Field(
        "zero",
        description="ranks that own parts of the states: zero: those of zero; data: also the other ranks over which "
        "gradients are summed, such as those of cp and dp",
    )
    bucket_mib: Annotated[float, MAY_CHANGE] = Field(32.0, gt=0, description="size of a bucket of fp32 gradients")
    reduce_dtype: SumFormat = Field(
        "fp32",
        description="format in which gradients are communicated and summed over ranks: bf16, fp16, or at least fp32, "
        "which is the format of the master weights",
    )
    overlap: Annotated[bool, MAY_CHANGE] = Field(
        True, description="overlap: sum gradients during backward, and gather weights during the next forward"
    )
