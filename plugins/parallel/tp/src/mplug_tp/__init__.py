"""Tensor parallelism (arXiv 1909.08053) with sequence parallelism (arXiv 2205.05198), derived from the model's plan.

If tp splits a linear's output axis, the linear is column-parallel. If tp splits its input axis, it is row-parallel. An
embedding or projection whose vocabulary axis is split is vocabulary-parallel. Nothing else decides this.
"""

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from mplug import MAY_CHANGE, Axis, UsageError, hookimpl

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mplug import Model, Offer, Run, RunConfig, Wrap


class TensorParallel:
    """Splits heads, MLP width and vocabulary over ranks, usually those of one node."""

    class Config(BaseModel):
        """How ranks store the residual stream."""

        model_config = ConfigDict(extra="forbid", frozen=True)

        sequence_parallel: Annotated[bool, MAY_CHANGE] = Field(
            True, description="split the sequence of the residual stream over the tensor-parallel ranks"
        )

        overlap: Annotated[bool | None, MAY_CHANGE] = Field(
            None,
            description="run the collectives around the products of split weights beside these products, in chunks "
            "(null: on GPUs, except in a run that goes on after the death of a process); GPUs that access each other's "
            "memory copy the chunks, other ranks send messages",
        )

        chunks: Annotated[Literal["ranks", "samples"], MAY_CHANGE] = Field(
            "ranks",
            description="what a chunk is, with overlap: the rows of one rank, or whole samples of all ranks, for fewer "
            "and larger products if a micro batch has several samples (samples: only between GPUs that access each "
            "other's memory)",
        )

    def __init__(self, config: Config) -> None:
        self.config = config

    @hookimpl
    def configure(self, config: "RunConfig") -> None:
        """Refuse sequence parallelism if tp does not divide the sequence length."""
        degree, length = config.parallel.degrees["tp"], config.trainer.seq_length
        if self.config.sequence_parallel and length % degree:
            raise UsageError(
                f"tp={degree} does not divide trainer.seq_length={length}; change one of them, or set "
                f"parallel.tp.sequence_parallel=false"
            )
        if self.config.chunks == "samples":
            if self.config.overlap is False:
                raise UsageError(
                    "parallel.tp.chunks=samples divides what overlaps, and parallel.tp.overlap is false; remove one"
                )
            if not self.config.sequence_parallel:
                raise UsageError(
                    "parallel.tp.chunks=samples divides what sequence parallelism gathers, and "
                    "parallel.tp.sequence_parallel is false; remove one"
                )

    @hookimpl
    def mesh_axes(self, config: "RunConfig") -> list[Axis]:
        """One axis, with the smallest distance between its ranks."""
        stream = ("sequence",) if self.config.sequence_parallel else ()
        splits = ("heads", "kv_heads", "mlp", "vocab")
        return [Axis("tp", config.parallel.degrees["tp"], splits=splits, activations=stream, distance=0)]

    @hookimpl
    def support_mixing(
        self, run: "Run", model: "Model", mixing: "Mapping[str, frozenset[str]]"
    ) -> "dict[str, bool | str]":
        """Modules between a column-parallel and a row-parallel linear see the whole sequence, so they may mix it."""
        from mplug_tp.regions import whole_sequences

        if run.mesh.axes["tp"].size == 1 or not self.config.sequence_parallel:
            return {}
        return whole_sequences(run, model, {name for name, axes in mixing.items() if axes == {"sequence"}})

    @hookimpl
    def offer(self, run: "Run", model: "Model") -> "list[Offer | Wrap]":
        """Collectives around or beside products, and the look-up and loss of a split vocabulary; nothing if tp=1."""
        from mplug_ops import refuse_healing
        from mplug_tp.suppliers import offers

        if run.mesh.axes["tp"].size == 1:
            return []
        overlap, on_gpus = self._overlaps(run), run.device.startswith("cuda")
        if self.config.overlap and on_gpus:
            refuse_healing(run, "parallel.tp.overlap=true", "set parallel.tp.overlap=false")
        if self.config.chunks == "samples" and not (overlap and on_gpus):
            where = "runs on the CPU" if overlap else "has no overlap (parallel.tp.overlap)"
            raise UsageError(
                f"parallel.tp.chunks=samples copies between GPUs beside products, and this run {where}; "
                f"set parallel.tp.chunks=ranks"
            )
        return offers(run, model, self.config.sequence_parallel, overlap, self.config.chunks)

    @hookimpl
    def offer_undivided(self, run: "Run", model: "Model") -> "list[Offer | Wrap]":
        """Those without sequence parallelism: all ranks have all positions of a call."""
        from mplug_tp.suppliers import offers

        return offers(run, model, sequence_parallel=False, overlap=False)

    @hookimpl
    def captures(self, run: "Run") -> bool | str:
        """A replay would wait for the counts of the recorded step, which the signals of that step have reached."""
        if run.mesh.axes["tp"].size == 1:
            return True
        if self._overlaps(run):
            return "counts its copies in signals between GPUs (parallel.tp.overlap)"
        return "has not been replayed in a CUDA graph yet"

    def _overlaps(self, run: "Run") -> bool:
        """`overlap`, or its default."""
        if self.config.overlap is None:
            return run.device.startswith("cuda") and not run.hooks.implementers("heal")
        return self.config.overlap
