"""The stages of a pipeline: which units each chunk has, and which rank runs it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, Protocol


class ActionTable(Protocol):
    """What each rank of a pipeline does in a step, in order: a row of actions for each rank."""

    @property
    def rows(self) -> Sequence[Sequence[object]]:
        """The rows. Equal actions have equal texts, by which ranks compare their tables."""


@dataclass(frozen=True)
class Stages:
    """The units of each chunk of the pipeline, in order, and the mesh axis that the pipeline's ranks lie along.

    `ranks` is the index along `axis` of each chunk's rank; without it, there is one chunk per rank, in order.
    `backward` is 'split' if the schedule computes the gradients of weights later than those of activations. `schedule`
    is the name of the pipeline schedule, and `table` returns its table (`mplug_schedules.Table`) for a number of micro
    batches. `in_flight` returns, for a number of micro batches, how many of them each rank along `axis` holds
    activations of at the peak.
    """

    axis: str
    units: tuple[tuple[str, ...], ...]
    backward: Literal["whole", "split"] = "whole"
    ranks: tuple[int, ...] | None = None
    schedule: str = ""
    table: Callable[[int], ActionTable] | None = None
    in_flight: Callable[[int], Sequence[float]] | None = None

    def __post_init__(self) -> None:
        if self.ranks is not None and len(self.ranks) != len(self.units):
            raise ValueError(f"there are {len(self.units)} chunks of units, and ranks for {len(self.ranks)} chunks")

    @cached_property
    def of(self) -> dict[str, int]:
        """The chunk of every unit."""
        return {unit: chunk for chunk, units in enumerate(self.units) for unit in units}

    def rank_of(self, chunk: int) -> int:
        """The index along `axis` of the rank that has a chunk."""
        return chunk if self.ranks is None else self.ranks[chunk]

    def chunks_of(self, rank: int) -> tuple[int, ...]:
        """The chunks of the rank at an index along `axis`, in the order of the model."""
        return tuple(chunk for chunk in range(len(self.units)) if self.rank_of(chunk) == rank)
