"""ZeRO (arXiv 1910.02054): data parallelism that shards optimizer state (stage 1) and gradients (stage 2)."""

from typing import TYPE_CHECKING

from mplug import Axis, Sharding, Variance, contiguous, hookimpl, rounding_of_sums
from mplug_zero.config import ZeROConfig

if TYPE_CHECKING:
    from mplug import Model, Run, RunConfig
    from mplug_zero.weights import Weights


class ZeRO:
    """Every rank computes with whole weights; masters and optimizer state are sharded, in stage 2 gradients too."""

    layer = -100
    """Runs before strategies that sum the gradients of the remaining parameters, such as dp."""

    Config = ZeROConfig

    captures = True
    """Every step starts the same sums and gathers, and waits for them."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self._weights: Weights | None = None

    @hookimpl
    def mesh_axes(self, config: "RunConfig") -> list[Axis]:
        """One axis that splits the batch; its ranks are nearer than replicas, which may be whole nodes."""
        return [Axis("zero", config.parallel.degrees["zero"], entries={"batch": contiguous}, distance=15)]

    @hookimpl
    def varies(self, config: "RunConfig") -> Variance | None:
        """The rounding of sums in a format that is narrower than fp32, if zero > 1."""
        word = self.config.reduce_dtype
        tolerance = rounding_of_sums(word)
        if tolerance is None or (config.parallel.degrees["zero"] == 1 and self.config.over == "zero"):
            return None
        return Variance(f"gradients are rounded to {word} and summed over ranks in {word}", tolerance, sums=("zero",))

    @hookimpl
    def shard_states(self, run: "Run", model: "Model") -> Sharding | None:
        """Give each rank an equal range of every bucket."""
        from mplug_zero.layout import sharding_of

        return sharding_of(run, model, self.config)

    @hookimpl
    def wrap_model(self, run: "Run", model: "Model") -> None:
        """Sum the gradients of every bucket onto their owners, and make every unit wait for its weights."""
        from mplug_zero.layout import divides

        if run.groups is None or not divides(run.mesh, self.config):
            return
        from mplug_zero.gradients import sum_onto_owners
        from mplug_zero.groups import groups_of
        from mplug_zero.weights import Weights

        # collective: the ranks of a frozen stage take part too
        groups = groups_of(run, model, self.config.over)
        model.sinks.reduced_over.update(axis for family in groups for axes in family for axis in axes)
        if model.shards is None or not model.shards.all:
            return
        sum_onto_owners(run, model, groups, self.config)
        self._weights = Weights(model, groups, overlap=self.config.overlap)

    @hookimpl
    def run_finished(self) -> None:
        """Wait for the weights that are still being gathered."""
        if self._weights is not None:
            self._weights.settle()
