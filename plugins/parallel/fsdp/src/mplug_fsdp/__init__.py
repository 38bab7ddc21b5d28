"""Fully sharded data parallelism (FSDP, arXiv 2304.11277; ZeRO-3, arXiv 1910.02054).

Each rank stores a contiguous range of every parameter's rows, with its gradient and optimizer state. The weights of a
unit are gathered before it computes and freed afterwards. Gradients are reduce-scattered to the ranks that store the
rows.
"""

from typing import TYPE_CHECKING

from mplug import Axis, UsageError, Variance, contiguous, hookimpl, rounding_of_sums
from mplug_fsdp.config import FSDPConfig
from mplug_fsdp.fit import AXIS, divide_rows

if TYPE_CHECKING:
    from mplug import Model, Run, RunConfig


class FullyShardedDataParallel:
    """Shards weights, gradients and optimizer state over data-parallel ranks."""

    Config = FSDPConfig

    def __init__(self, config: FSDPConfig) -> None:
        self.config = config

    @hookimpl
    def configure(self, config: "RunConfig") -> None:
        """Refuse another strategy that shards optimizer state, because fsdp shards it already."""
        rivals = [chosen.label for chosen in config.chosen if hasattr(chosen.plugin, "shard_states")]
        if rivals:
            raise UsageError(
                f"parallel/fsdp and {rivals[0]} both shard the optimizer state of the same parameters; use a layout "
                f"with only one of them"
            )

    @hookimpl
    def mesh_axes(self, config: "RunConfig") -> list[Axis]:
        """One axis that splits the batch; its ranks are nearer than replicas, because they exchange all weights."""
        return [Axis(AXIS, config.parallel.degrees[AXIS], entries={"batch": contiguous}, distance=15)]

    @hookimpl
    def captures(self, run: "Run", model: "Model") -> bool | str | None:
        """None, as without this hook, if everything travels by messages."""
        return "counts its copies in signals between GPUs" if self._copies(run) else None

    @hookimpl
    def varies(self, config: "RunConfig") -> Variance | None:
        """The rounding of sums in a format that is narrower than fp32, if fsdp > 1.

        They come before the sinks, so no other strategy can sum the same gradients.
        """
        word = self.config.reduce_dtype
        tolerance = rounding_of_sums(word)
        if tolerance is None or config.parallel.degrees[AXIS] == 1:
            return None
        return Variance(f"gradients are rounded to {word} and summed over ranks in {word}", tolerance, sums=())

    @hookimpl
    def shard_model(self, run: "Run", model: "Model") -> None:
        """Shard the rows of every parameter whose gradient is partial over the axis."""
        if self._copies(run):
            from mplug_fsdp.peer_rows import REMEDY, SETTING
            from mplug_ops import refuse_healing

            refuse_healing(run, SETTING, REMEDY)
        if run.mesh.axes[AXIS].size > 1:
            divide_rows(run, model, self.config)

    def _copies(self, run: "Run") -> bool:
        """Whether weights or gradients travel by copies."""
        by_messages = {self.config.transport, self.config.sum_transport} == {"messages"}
        return not by_messages and run.mesh.axes[AXIS].size > 1

    @hookimpl
    def wrap_model(self, run: "Run", model: "Model") -> None:
        """Let every unit gather its weights and sum its gradients; do nothing if fsdp=1."""
        from mplug_fsdp.units import shard_units

        group = run.group(AXIS, use="weights")
        if group is not None:
            shard_units(run, model, group, self.config)
