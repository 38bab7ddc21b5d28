"""Data parallelism whose gradients are rounded to bf16 before they travel: half of the traffic, 8 bits of precision."""

from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, Field

from mplug import Axis, Variance, contiguous, hookimpl

if TYPE_CHECKING:
    from mplug import Model, Run, RunConfig

REASON = "gradients are rounded to bf16 before they are summed over replicas"


class Squeeze:
    """Every rank holds the model and reads its part of the batch; gradients are all-reduced in bf16."""

    layer = -1
    """Before other replicas' strategies: it sums over their ranks too."""

    class Config(BaseModel):
        """What is compressed."""

        model_config = ConfigDict(extra="forbid", frozen=True)

        smallest: int = Field(0, ge=0, description="gradients of fewer elements travel as they are")

    def __init__(self, config: Config) -> None:
        self.config = config

    @hookimpl
    def mesh_axes(self, config: "RunConfig") -> list[Axis]:
        """One axis over the batch."""
        return [Axis("squeeze", config.parallel.degrees["squeeze"], entries={"batch": contiguous}, distance=18)]

    @hookimpl
    def varies(self, config: "RunConfig") -> Variance | None:
        """Sums of rounded gradients."""
        if config.parallel.degrees["squeeze"] == 1:
            return None
        return Variance(REASON, tolerance=2.0**-6, sums=("squeeze",))

    @hookimpl
    def wrap_model(self, run: "Run", model: "Model") -> None:
        """Sum each gradient as soon as it is final."""
        from acme_squeeze.sums import sum_compressed

        sinks, groups = model.sinks, model.data_groups(run)
        trained = {name: one.data_axes for name, one in model.placements.items() if one.parameter.trainable}
        summed = {name: axes for name, axes in trained.items() if groups[name] and sinks.reduced_over.isdisjoint(axes)}
        for name, sink in sinks.items():
            if name in summed:
                sink.listeners.append(sum_compressed(groups[name], self.config.smallest))
        sinks.reduced_over.update(*summed.values())  # also those of other pipeline stages: alike on all ranks
