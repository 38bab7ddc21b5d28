"""Context parallelism: splits the sequence of every sample over ranks, from the batch to the loss.

Among the slots, those of attention, scans and short convolutions mix positions. So this plugin wraps the suppliers of
these; the model, its plan and its kernels need no change. Ranks share the segments of streams, and gather the rows
where these join the tokens.
"""

from typing import TYPE_CHECKING

from mplug import Axis, UsageError, contiguous, hookimpl
from mplug_cp.config import ContextParallelConfig
from mplug_cp.division import document_map
from mplug_cp.zigzag import zigzag

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mplug import Model, Run, RunConfig, Wrap


class ContextParallel:
    """Each rank holds a part of every sequence; ranks exchange keys and values, or heads, and the states of scans."""

    Config = ContextParallelConfig

    def __init__(self, config: Config) -> None:
        self.config = config

    @hookimpl
    def configure(self, config: "RunConfig") -> None:
        """Refuse a `ulysses_degree` that does not divide cp; 'hierarchical' requires one, other methods refuse it."""
        inner, degree = self.config.ulysses_degree, config.parallel.degrees["cp"]
        if (inner is None) == (self.config.method == "hierarchical"):
            degree_set = "null" if inner is None else inner
            remedy = "set it to a divisor of cp" if inner is None else "remove it"
            raise UsageError(
                f"parallel.cp.ulysses_degree={degree_set} does not fit parallel.cp.method={self.config.method}: "
                f"'hierarchical' requires a degree, and every other method refuses it; {remedy}, or change the method"
            )
        if inner is not None and degree % inner:
            raise UsageError(f"parallel.cp.ulysses_degree={inner} does not divide cp={degree}; change one of them")
        if self.config.head_chunks > 1 and self.config.method != "ulysses":
            raise UsageError(
                f"parallel.cp.head_chunks={self.config.head_chunks} is for parallel.cp.method=ulysses, not "
                f"{self.config.method}; change one of them"
            )
        if self.config.transport == "copy_engines" and self.config.method != "ulysses":
            raise UsageError(
                f"parallel.cp.transport=copy_engines is for parallel.cp.method=ulysses, not {self.config.method}; "
                f"change one of them"
            )
        if self._divides_documents and self.config.method != "all_gather":
            raise UsageError(
                f"parallel.cp.divide=documents exchanges the keys of divided documents in one message, which is "
                f"parallel.cp.method=all_gather, not {self.config.method}; change one of them"
            )

    @hookimpl
    def mesh_axes(self, config: "RunConfig") -> list[Axis]:
        """One axis that splits the sequence; 'hierarchical' has two, and the ranks of the second one are nearer."""
        degree, inner = config.parallel.degrees["cp"], self.config.ulysses_degree or 1
        if self.config.method == "ulysses":
            return [Axis("cp", degree, entries={"sequence": contiguous}, distance=10, shares_streams=True)]
        cut = document_map(self.config.equal_length) if self._divides_documents else zigzag
        axes = [Axis("cp", degree // inner, entries={"sequence": cut}, distance=11, shares_streams=True)]
        if self.config.method == "hierarchical":
            axes.append(Axis("cp_heads", inner, entries={"sequence": contiguous}, distance=10, shares_streams=True))
        return axes

    @hookimpl
    def support_mixing(self, model: "Model", mixing: "Mapping[str, frozenset[str]]") -> "dict[str, bool | str]":
        """Scans and short convolutions mix positions in a slot whose states this plugin passes on."""
        from mplug_cp.states import passes_states

        found = {name for name, axes in mixing.items() if axes == {"sequence"}}
        return {name: True for name in found if passes_states(model.module.get_submodule(name))}

    @property
    def _divides_documents(self) -> bool:
        return self.config.divide == "documents"

    @hookimpl
    def captures(self, run: "Run", model: "Model") -> bool | str | None:
        """None, as without this hook, if messages have the same sizes in every step."""
        if self.config.transport == "copy_engines" and run.mesh.axes["cp"].size > 1:
            return "counts its exchanges in signals between GPUs"
        return "exchanges messages whose sizes depend on the documents" if self._divides_documents else None

    @hookimpl
    def offer(self, run: "Run", model: "Model") -> "list[Wrap]":
        """The wraps of every attention core, scan and short convolution; nothing if cp=1."""
        from mplug_cp.states import around_mixers
        from mplug_cp.wraps import around_attention

        return [*around_attention(run, self.config), *around_mixers(run, self.config)]

    @hookimpl
    def offer_undivided(self) -> "list[Wrap]":
        """Nothing: each rank computes its own samples as one process does."""
        return []
