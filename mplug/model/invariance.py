"""What the host asks of the package that says whether a layout computes a model as one process does."""

from collections.abc import Container, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from mplug.model.model import Model
from mplug.registry.provided import needed, provided
from mplug.run.run import Run

if TYPE_CHECKING:
    from mplug.layout.mesh import Mesh


class Summing(NamedTuple):
    """A strategy that sums gradients while backward runs, and the mesh axes over which it does."""

    label: str
    axes: frozenset[str]


class Invariance(Protocol):
    """The methods of the class in the entry-point group 'mplug.invariances'. Their errors are UsageErrors.

    The host calls them in every run. Without an installed class, it refuses runs of several processes.
    """

    def mixing(self, run: Run, model: Model) -> tuple[Any, ...]:
        """What the modules of a whole model mix, for `Model.mixing`; refuses a layout that divides it."""

    def ranks_of_unlike_stages(self, model: Model, mesh: "Mesh", entries: Container[str]) -> list[int]:
        """The first rank of every stage with a kind of block that the stages before it lack, without rank 0.

        Called between `Model.place` and `Model.keep_stage`.
        """

    def refuse_layout(self, run: Run, model: Model) -> None:
        """Refuse a layout that bypasses a declared sum of gradients (`mplug.Variance`)."""

    def refuse_other_plugins(self, run: Run) -> None:
        """Raise RunError unless every rank has the same plugins, in the same versions and order. Collective."""

    def refuse_other_stages(self, run: Run, model: Model) -> None:
        """Refuse ranks with other stages, or other tables of actions, than rank 0. Collective."""

    def refuse_summers(self, run: Run, model: Model, summing: Sequence[Summing]) -> None:
        """Refuse strategies that sum the same buffers, or as a declared sum forbids; all ranks must name the same axes.

        Collective. Called when strategies have named the axes over which they sum gradients.
        """

    def layout_dependence(self, run: Run, model: Model) -> list[str]:
        """Why losses and gradients depend on the layout beyond rounding: a sentence each."""


def invariance_of(run: Run) -> Invariance | None:
    """The installed class; None if there is none, and the run has one process."""
    what = f"a run of {run.mesh.world_size} processes (--parallel)"
    found: Invariance | None = (
        provided("invariances") if run.mesh.world_size == 1 else needed("invariances", what, "mplug-invariance")
    )
    return found


def refuse_other_stages(run: Run, model: Model) -> None:
    """Raise UsageError on all ranks unless they have the same chunks of units and the same tables of actions."""
    if (found := invariance_of(run)) is not None:
        found.refuse_other_stages(run, model)


def layout_dependence_of_all(run: Run, model: Model) -> tuple[str, ...]:
    """Why all ranks' parts of a model together depend on the layout. Collective: all ranks must call it."""
    found = invariance_of(run)
    own = [] if found is None else found.layout_dependence(run, model)
    return tuple(sorted({line for lines in run.gathered(own) for line in lines}))
