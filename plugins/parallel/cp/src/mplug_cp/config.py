"""The config of ContextParallel."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt

from mplug import MAY_CHANGE

Divide = Literal["sequence", "documents"]
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
    divide: Annotated[Divide, MAY_CHANGE] = Field(
        "sequence",
        description="sequence: every sample is cut at the same positions; documents: documents of packed samples that "
        "are shorter than a rank's share stay whole on one rank, and longer ones are divided over as many ranks as "
        "gives all ranks equal work; requires method=all_gather",
    )
    equal_length: Annotated[PositiveInt, MAY_CHANGE] = Field(
        32768,
        description="for divide=documents: the length at which a document has as much work in attention as outside of "
        "it, as mplug explain prints it for packed data",
    )
    head_chunks: Annotated[PositiveInt, MAY_CHANGE] = Field(
        1,
        description="for method=ulysses: heads are exchanged in so many chunks, and attention of one chunk hides the "
        "exchange of the next; where this number does not divide the KV heads of a rank, all heads are one chunk",
    )
    transport: Annotated[Literal["messages", "copy_engines"], MAY_CHANGE] = Field(
        "messages",
        description="for method=ulysses: how heads travel: messages of the process group, or copies by the copy "
        "engines of the GPUs, which take no multiprocessor from attention; these need GPUs of one machine. Sites that "
        "head_chunks does not serve use messages",
    )
    ulysses_degree: Annotated[PositiveInt | None, MAY_CHANGE] = Field(
        None, description="ranks per group that divide heads among themselves; required by, and only for, hierarchical"
    )
