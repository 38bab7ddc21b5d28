"""The config of ContextParallel."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt

from mplug import MAY_CHANGE

Method = Literal["ring", "all_gather", "ulysses", "hierarchical"]


class ContextParallelConfig(BaseModel):
    """How attention combines the queries of a rank with the keys and values of all ranks."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    method: Annotated[Method, MAY_CHANGE] = Field(
        "ring",
        description="ring: ranks pass keys and values around a ring while they compute attention; all_gather: every "
        "rank gathers all keys and values; ulysses: every rank computes some of the heads for the whole sequence; "
        "hierarchical: ulysses within groups of neighbouring ranks, a ring between the groups",
    )
    ulysses_degree: Annotated[PositiveInt | None, MAY_CHANGE] = Field(
        None, description="ranks per group that divide heads among themselves; required by, and only for, hierarchical"
    )
