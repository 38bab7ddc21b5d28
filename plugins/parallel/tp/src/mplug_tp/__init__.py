"""Tensor parallelism (arXiv 1909.08053) with sequence parallelism (arXiv 2205.05198), from the plan alone.

A linear whose output axis is split over tp is column-parallel, one whose input axis is split is row-parallel, and an
embedding or projection whose vocabulary is split is vocabulary-parallel: nothing else decides it.
"""

from typing import TYPE_CHECKING, Annotated

from pydantic import BaseModel, ConfigDict, Field

from mplug import MAY_CHANGE, Axis, UsageError, hookimpl

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mplug import Model, Offer, Run, RunConfig, Wrap


class TensorParallel:
    """Heads, MLP width and vocabulary divided over the ranks of a node."""

    class Config(BaseModel):
        """How the residual stream is held."""

        model_config = ConfigDict(extra="forbid", frozen=True)

        sequence_parallel: Annotated[bool, MAY_CHANGE] = Field(
            True, description="divide the residual stream's sequence over the same ranks"
        )

    def __init__(self, config: Config) -> None:
        self.config = config

    @hookimpl
    def configure(self, config: "RunConfig") -> None:
        """A divided sequence must divide evenly."""
        degree, length = config.parallel.degrees["tp"], config.trainer.seq_length
        if self.config.sequence_parallel and length % degree:
            raise UsageError(
                f"tp={degree} does not divide trainer.seq_length={length}; change one of them, or set "
                f"parallel.tp.sequence_parallel=false"
            )

    @hookimpl
    def mesh_axes(self, config: "RunConfig") -> list[Axis]:
        """One axis, whose ranks sit nearest to each other."""
        stream = ("sequence",) if self.config.sequence_parallel else ()
        splits = ("heads", "kv_heads", "mlp", "vocab")
        return [Axis("tp", config.parallel.degrees["tp"], splits=splits, activations=stream, distance=0)]

    @hookimpl
    def support_mixing(
        self, run: "Run", model: "Model", mixing: "Mapping[str, frozenset[str]]"
    ) -> "dict[str, bool | str]":
        """Between a column- and a row-parallel linear the sequence is whole: modules there may mix it."""
        from mplug_tp.regions import whole_sequences

        if run.mesh.axes["tp"].size == 1 or not self.config.sequence_parallel:
            return {}
        return whole_sequences(run, model, {name for name, axes in mixing.items() if axes == {"sequence"}})

    @hookimpl
    def offer(self, run: "Run", model: "Model") -> "list[Offer | Wrap]":
        """Collectives around the products, and the look-up and loss of a divided vocabulary; of one rank, nothing."""
        from mplug_tp.suppliers import offers

        if run.mesh.axes["tp"].size == 1:
            return []
        return offers(run, model, self.config.sequence_parallel)
