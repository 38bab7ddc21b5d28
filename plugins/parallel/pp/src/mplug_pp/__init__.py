"""Pipeline parallelism: splits a model's units into chunks and runs each rank's chunks by a table of actions."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt

from mplug import MAY_CHANGE, Axis, Pipeline, Stages, UsageError, hookimpl
from mplug_pp.stages import divide
from mplug_schedules import Shape, Table, find_schedule, peak, proven_table

if TYPE_CHECKING:
    from mplug import Model, Run, RunConfig


ROUNDS = 8
"""A table with more micro batches than this for each rank repeats itself in the middle."""


def extrapolated(peaks: Callable[[int], list[float]], ranks: int, number: int) -> list[float]:
    """The peaks of a table for a number of micro batches, from those of smaller numbers if it is large.

    The middle of a table repeats itself every `ranks` micro batches, if no setting decides the size of its groups. The
    table of 16,384 micro batches would take seconds.
    """
    rounds = max(ROUNDS, ranks)  # as many groups as there may be micro batches over
    if number < (rounds + 2) * ranks:
        return peaks(number)
    short = rounds * ranks + number % ranks
    further = (number - short) // ranks
    return [one + further * (two - one) for one, two in zip(peaks(short), peaks(short + ranks), strict=True)]


class PipelineParallel:
    """Each rank keeps the weights of its chunks; activations and their gradients travel between ranks."""

    class Config(BaseModel):
        """The schedule, and the units of each chunk."""

        model_config = ConfigDict(extra="forbid", frozen=True)

        schedule: Annotated[str, MAY_CHANGE] = Field(
            "1f1b", description="order of forward and backward passes: the name of an installed schedule"
        )
        chunks: Annotated[PositiveInt | None, MAY_CHANGE] = Field(
            None, description="number of chunks of each rank; null: the schedule's default"
        )
        group: Annotated[PositiveInt | None, MAY_CHANGE] = Field(
            None,
            description="number of consecutive micro batches that run in a chunk before the rank's next chunk; null: "
            "the number of ranks, or a little more",
        )
        limit: Annotated[PositiveFloat | None, MAY_CHANGE] = Field(
            None, description="maximum number of micro batches whose activations a rank holds; null: the schedule's"
        )
        split: Annotated[Literal["weights", "layers", "time"] | tuple[PositiveInt, ...], MAY_CHANGE] = Field(
            "weights",
            description="how units are split: chunks of about equal weights, numbers of layers or predicted time; or "
            "the number of units of each chunk, in the order of the model",
        )

    def __init__(self, config: Config) -> None:
        self.config = config

    @hookimpl
    def configure(self, config: "RunConfig") -> None:
        """Refuse an unknown schedule, and numbers of units that do not fit the number of stages."""
        find_schedule(self.config.schedule)
        stages, split = config.parallel.degrees["pp"], self.config.split
        if not isinstance(split, str) and len(split) % stages:
            raise UsageError(
                f"parallel.pp.split has {len(split)} numbers, and pp={stages} has {stages} stages; set one number per "
                f"stage, or for each chunk of every stage"
            )

    @hookimpl
    def mesh_axes(self, config: "RunConfig") -> list[Axis]:
        """One axis, shared by all views, with the largest distance between its ranks."""
        views = ("dense", "sparse")
        return [Axis("pp", config.parallel.degrees["pp"], activations=("units",), distance=100, views=views)]

    @hookimpl
    def build_pipeline(self, run: "Run", model: "Model") -> Pipeline:
        """The stages, the stepper that follows the schedule's table, and the relay that follows its forward half."""
        from mplug_pp.relay import ForwardRelay  # imports torch
        from mplug_pp.runtime import PipelineStepper

        stages = self._stages(run, model)
        return Pipeline(stages, stepper=partial(PipelineStepper, run, model), relay=partial(ForwardRelay, run, model))

    def _stages(self, run: "Run", model: "Model") -> Stages:
        """Split the units into contiguous chunks, after a proof of the tables of all steps.

        Sampling has a table for one micro batch: all samples that the rank computes together.
        """
        size = run.mesh.axes["pp"].size

        def table(num_micro_batches: int) -> Table:
            config = self.config
            return proven_table(
                config.schedule, Shape(size, num_micro_batches, config.chunks, config.group, config.limit)
            )

        def peaks(num_micro_batches: int) -> list[float]:
            made = table(num_micro_batches)
            return [peak(made, rank) for rank in range(size)]

        in_flight = peaks if self.config.group else partial(extrapolated, peaks, size)

        tables = [table(number) for number in run.micro_batch_counts()] if run.trains else [table(1)]
        if any(one.ranks != tables[0].ranks for one in tables):
            raise UsageError(
                f"parallel.pp.schedule={self.config.schedule} gives chunks to other ranks if the number of micro "
                f"batches changes, which a run cannot follow; use another schedule, or a constant batch size"
            )
        chunks = len(tables[0].ranks) // size
        units = divide(model, size, self.config.split, chunks, run.config.trainer.seq_length)
        backward: Literal["whole", "split"] = "split" if any(one.splits_backward for one in tables) else "whole"
        return Stages("pp", units, backward, tables[0].ranks, self.config.schedule, table, in_flight)
