"""The config of ContextParallel."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt

from mplug import MAY_CHANGE

Method = Literal["ring", "all_gather", "ulysses", "hierarchical"]


class ContextParallelConfig(BaseModel):
    """How queries get to see the keys of other ranks."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    method: Annotated[Method, MAY_CHANGE] = Field(
        "ring",
        description="ring: keys and values go round, rank by rank, under attention; all_gather: every rank gets "
        "all of them; ulysses: every rank gets the whole sequence of a part of the heads; hierarchical: ulysses "
        "inside groups of neighbours, a ring between the groups",
    )
    ulysses_degree: Annotated[PositiveInt | None, MAY_CHANGE] = Field(
        None, description="ranks of a group inside which heads are divided; only, and always, with hierarchical"
    )
