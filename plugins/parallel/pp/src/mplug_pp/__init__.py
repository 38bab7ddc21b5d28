"""Pipeline parallelism: splits a model's units into stages and runs each stage by a table of actions."""

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt

from mplug import MAY_CHANGE, Axis, Stages, UsageError, hookimpl
from mplug_pp.stages import divide

if TYPE_CHECKING:
    from mplug import DefaultStepper, Model, Run, RunConfig, Stepper


class PipelineParallel:
    """Each rank keeps the weights of its stage; activations and their gradients travel between stages."""

    class Config(BaseModel):
        """The schedule, and the units of each stage."""

        model_config = ConfigDict(extra="forbid", frozen=True)

        schedule: Annotated[Literal["1f1b", "gpipe"], MAY_CHANGE] = Field(
            "1f1b", description="order of forward and backward passes"
        )
        units_per_stage: Annotated[tuple[PositiveInt, ...] | None, MAY_CHANGE] = Field(
            None, description="number of units of each stage, in order; null: stages of about equal work"
        )

    def __init__(self, config: Config) -> None:
        self.config = config

    @hookimpl
    def configure(self, config: "RunConfig") -> None:
        """Refuse a `units_per_stage` whose number of entries is not the number of stages."""
        stages, counts = config.parallel.degrees["pp"], self.config.units_per_stage
        if counts is not None and len(counts) != stages:
            raise UsageError(
                f"parallel.pp.units_per_stage has {len(counts)} numbers, and pp={stages} has {stages} stages; set one "
                f"number per stage"
            )

    @hookimpl
    def mesh_axes(self, config: "RunConfig") -> list[Axis]:
        """One axis, shared by all views, with the largest distance between its ranks."""
        views = ("attention", "expert")
        return [Axis("pp", config.parallel.degrees["pp"], activations=("units",), distance=100, views=views)]

    @hookimpl
    def split_model(self, run: "Run", model: "Model") -> Stages:
        """Split the units into contiguous stages."""
        return Stages("pp", divide(model, run.mesh.axes["pp"].size, self.config.units_per_stage))

    @hookimpl
    def build_stepper(self, run: "Run", model: "Model", default: "DefaultStepper") -> "Stepper":
        """A stepper that follows the schedule's table."""
        from mplug_pp.runtime import PipelineStepper
        from mplug_pp.schedules import SCHEDULES

        return PipelineStepper(run, model, default, SCHEDULES[self.config.schedule])
