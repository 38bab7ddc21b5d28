"""The options of fully sharded data parallelism."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from mplug import MAY_CHANGE, SumFormat


class FSDPConfig(BaseModel):
    """When weights are gathered and freed, how gradients are summed, and where shards are stored."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    reshard_after_forward: Annotated[bool, MAY_CHANGE] = Field(
        True, description="free a unit's weights after its forward pass, and gather them again for its backward"
    )
    prefetch: Annotated[int, MAY_CHANGE] = Field(
        1, ge=0, description="number of units whose weights are gathered before their turn to compute"
    )
    gather: Annotated[Literal["weights", "copies"], MAY_CHANGE] = Field(
        "weights",
        description="what ranks gather for each pass: weights in the precision of the run, or the copies that products "
        "read (FP8), where a product allows it; 'mplug explain' lists which",
    )
    transport: Annotated[Literal["messages", "copy_engines"], MAY_CHANGE] = Field(
        "messages",
        description="how gathered weights travel: messages of the process group, or copies by the copy engines of the "
        "GPUs, which take no multiprocessor from products; these need GPUs of one machine, and memory for this rank's "
        "rows of all weights in the precision of the run",
    )
    sum_transport: Annotated[Literal["messages", "copy_engines"], MAY_CHANGE] = Field(
        "messages",
        description="how gradients travel to the ranks that keep their rows: messages of the process group, or copies "
        "by the copy engines of the GPUs of one machine, which are added where they arrive",
    )
    reduce_dtype: SumFormat = Field(
        "fp32",
        description="format in which gradients are communicated and summed over ranks: bf16, fp16, or at least "
        "fp32, which is the format of the master weights",
    )
    cpu_offload: Annotated[bool, MAY_CHANGE] = Field(
        False, description="keep the sharded weights, gradients and optimizer state in CPU memory"
    )
