"""ZeRO (arXiv 1910.02054): data-parallel ranks that each keep a part of the optimizer state, and of the gradients."""

from typing import TYPE_CHECKING

from mplug import Axis, Sharding, Variance, contiguous, hookimpl
from mplug_zero.config import ZeROConfig

if TYPE_CHECKING:
    from mplug import Model, Run, RunConfig
    from mplug_zero.weights import Weights


TOLERANCE = 2.0**-6
"""Of gradients that are summed in bf16: they are rounded to 8 bits, and the sums of a few ranks again."""


class ZeRO:
    """Every rank computes with whole weights; masters, optimizer state and gradients are divided."""

    layer = -100
    """Before strategies that sum gradients of whoever is left, such as replicas."""

    Config = ZeROConfig

    def __init__(self, config: Config) -> None:
        self.config = config
        self._weights: Weights | None = None

    @hookimpl
    def mesh_axes(self, config: "RunConfig") -> list[Axis]:
        """One axis that divides the batch, nearer than that of replicas: these may be whole nodes."""
        return [Axis("zero", config.parallel.degrees["zero"], entries={"batch": contiguous}, distance=15)]

    @hookimpl
    def varies(self, config: "RunConfig") -> Variance | None:
        """Sums in bf16, where there are several ranks."""
        if self.config.reduce_dtype == "fp32" or config.parallel.degrees["zero"] == 1:
            return None
        return Variance("gradients are rounded to bf16 and summed over ranks in it", TOLERANCE, sums=("zero",))

    @hookimpl
    def shard_states(self, run: "Run", model: "Model", needs: str) -> Sharding | None:
        """Each rank owns as much as every other, in ranges or in whole matrices."""
        from mplug_zero.layout import sharding_of

        return sharding_of(run, model, needs, self.config)

    @hookimpl
    def wrap_model(self, run: "Run", model: "Model") -> None:
        """Sum every bucket's gradients onto their owners, and let every unit wait for its weights."""
        if run.mesh.axes["zero"].size == 1 or run.groups is None:
            return
        from mplug_zero.gradients import sum_onto_owners
        from mplug_zero.groups import groups_of
        from mplug_zero.weights import Weights

        groups = groups_of(run, model)  # made by all ranks together, also by those of a stage that is frozen
        model.sinks.reduced_over.update(axis for family in groups for axes in family for axis in axes)
        if model.shards is None:
            return
        sum_onto_owners(model, groups, self.config)
        self._weights = Weights(model, groups, overlap=self.config.overlap)

    @hookimpl
    def run_finished(self) -> None:
        """Let no gathering of weights outlast the run."""
        if self._weights is not None:
            self._weights.wait(*tuple(self._weights.under_way))
