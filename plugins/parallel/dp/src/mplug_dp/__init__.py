"""Replicated data parallelism: every rank holds a replica of the model and reads its part of the batch."""

from typing import TYPE_CHECKING, Annotated

from pydantic import BaseModel, ConfigDict, Field

from mplug import MAY_CHANGE, Axis, contiguous, hookimpl

if TYPE_CHECKING:
    from mplug import Model, Run, RunConfig


class DataParallel:
    """Sums gradients over the replicas in buckets, each as soon as its gradients are final."""

    class Config(BaseModel):
        """How gradients are communicated."""

        model_config = ConfigDict(extra="forbid", frozen=True)

        bucket_mib: Annotated[float, MAY_CHANGE] = Field(32.0, gt=0, description="size of a bucket of fp32 gradients")

    captures = True
    """Every step starts the same sums, and waits for them."""
    sums_for_others = True
    """The buckets hold all gradients of data axes, of context parallelism too."""

    def __init__(self, config: Config) -> None:
        self.config = config

    @hookimpl
    def mesh_axes(self, config: "RunConfig") -> list[Axis]:
        """One axis that splits the batch; its distance lies between those of tensor and pipeline parallelism."""
        return [Axis("dp", config.parallel.degrees["dp"], entries={"batch": contiguous}, distance=20)]

    @hookimpl
    def wrap_model(self, run: "Run", model: "Model") -> None:
        """Listen to the sink of every trained parameter whose gradient no other strategy sums."""
        from mplug_dp.buckets import reduce_in_buckets

        trained = {name: one for name, one in model.placements.items() if one.parameter.trainable}
        axes = {name: placement.data_axes for name, placement in trained.items()}
        groups = {
            name: group
            for name, group in model.data_groups(run).items()
            if group is not None and name in axes and model.sinks.reduced_over.isdisjoint(axes[name])
        }
        if groups:
            model.sinks.reduced_over.update(*(axes[name] for name in groups))
            reduce_in_buckets(model.sinks, groups, int(self.config.bucket_mib * 2**20))
