"""Fully sharded data parallelism (FSDP, arXiv 2304.11277; ZeRO-3, arXiv 1910.02054) by torch's `fully_shard`.

Each rank keeps a stretch of every parameter's rows, of its gradient and of the optimizer's state. The weights of a unit
are gathered before it computes, and freed after; gradients are summed to the rank that keeps their rows.
"""

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from mplug import MAY_CHANGE, Axis, UsageError, Variance, contiguous, hookimpl
from mplug_fsdp.fit import AXIS, divide_rows

if TYPE_CHECKING:
    from mplug import Model, Run, RunConfig


TOLERANCE = 2.0**-6
"""Of gradients that are summed in bf16: they are rounded to 8 bits, and the sums of a few ranks again."""


class FullyShardedDataParallel:
    """Weights, gradients and optimizer state divided over the replicas."""

    class Config(BaseModel):
        """What is kept, and how it travels."""

        model_config = ConfigDict(extra="forbid", frozen=True)

        reshard_after_forward: Annotated[bool, MAY_CHANGE] = Field(
            True, description="free a unit's weights after its forward pass, and gather them again for its backward"
        )
        prefetch: Annotated[int, MAY_CHANGE] = Field(
            1, ge=0, description="units whose weights are gathered ahead of the one that computes"
        )
        reduce_dtype: Literal["fp32", "bf16"] = Field(
            "fp32", description="precision in which a micro batch's gradients are summed over ranks"
        )
        cpu_offload: Annotated[bool, MAY_CHANGE] = Field(
            False, description="keep the divided weights, gradients and optimizer state in the host's memory"
        )

    def __init__(self, config: Config) -> None:
        self.config = config

    @hookimpl
    def configure(self, config: "RunConfig") -> None:
        """Another strategy that divides the optimizer's state would divide what is divided already."""
        rivals = [chosen.label for chosen in config.chosen if hasattr(chosen.plugin, "shard_states")]
        if rivals:
            raise UsageError(
                f"parallel/fsdp divides parameters, gradients and the optimizer's state, and so does {rivals[0]}, "
                f"for the same parameters; name one of them in the layout"
            )

    @hookimpl
    def mesh_axes(self, config: "RunConfig") -> list[Axis]:
        """One axis that divides the batch, nearer than replicas: its ranks exchange every weight in every pass."""
        return [Axis(AXIS, config.parallel.degrees[AXIS], entries={"batch": contiguous}, distance=15)]

    @hookimpl
    def varies(self, config: "RunConfig") -> Variance | None:
        """Sums in bf16. They come before the sinks, so no other strategy can sum the same gradients."""
        if self.config.reduce_dtype == "fp32" or config.parallel.degrees[AXIS] == 1:
            return None
        return Variance("gradients are rounded to bf16 and summed over ranks in it", TOLERANCE, sums=())

    @hookimpl
    def shard_model(self, run: "Run", model: "Model") -> None:
        """Divide the rows of every parameter whose gradient is partial over the axis."""
        if run.mesh.axes[AXIS].size > 1:
            divide_rows(run, model, self.config.cpu_offload)

    @hookimpl
    def wrap_model(self, run: "Run", model: "Model") -> None:
        """Let torch gather the weights around every unit; of one rank, nothing."""
        from mplug_fsdp.units import Options, shard_units

        group = run.group(AXIS, use="weights")
        if group is not None:
            options = Options(**self.config.model_dump(), compute=run.config.trainer.precision)
            shard_units(run, model, group, options)
