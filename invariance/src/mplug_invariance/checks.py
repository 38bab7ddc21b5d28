"""What the host asks about a layout (`mplug.model.invariance.Invariance`)."""

from collections.abc import Container, Sequence

from mplug.layout.mesh import Mesh
from mplug.model.invariance import Summing
from mplug.model.model import Model
from mplug.run.run import Run
from mplug_invariance.mixing import refuse_mixing
from mplug_invariance.ranks_alike import (
    refuse_other_axes,
    refuse_other_plugins,
    refuse_other_stages,
    refuse_races,
    refuse_two_steppers,
)
from mplug_invariance.statement import Statement
from mplug_invariance.unlike_stages import ranks_of_unlike_stages
from mplug_invariance.variance import layout_dependence, refuse_bypassing, refuse_bypassing_layout


class Invariance:
    """The class of the entry-point group 'mplug.invariances'."""

    def mixing(self, run: Run, model: Model) -> tuple[Statement, ...]:
        """What the modules of a whole model mix; UsageError if the layout would compute one of them wrongly."""
        refuse_two_steppers(run, model)
        return refuse_mixing(run, model)

    def ranks_of_unlike_stages(self, model: Model, mesh: Mesh, entries: Container[str]) -> list[int]:
        """The first rank of every stage with a kind of block that the stages before it lack, without rank 0."""
        return ranks_of_unlike_stages(model, mesh, entries)

    def refuse_layout(self, run: Run, model: Model) -> None:
        """Raise UsageError if the layout bypasses a declared sum of gradients."""
        refuse_bypassing_layout(run, model)

    def refuse_other_plugins(self, run: Run) -> None:
        """Raise RunError unless every rank has the same plugins, in the same versions and order."""
        refuse_other_plugins(run)

    def refuse_other_stages(self, run: Run, model: Model) -> None:
        """Raise UsageError on all ranks unless they have the same stages and tables of actions."""
        refuse_other_stages(run, model)

    def refuse_summers(self, run: Run, model: Model, summing: Sequence[Summing]) -> None:
        """Raise UsageError if the sums of strategies contradict one another."""
        summers = {axis: one.label for one in summing for axis in one.axes}
        refuse_races(model, summing)
        refuse_other_axes(run, summers)
        refuse_bypassing(run, model, summers)

    def layout_dependence(self, run: Run, model: Model) -> list[str]:
        """Why losses and gradients depend on the layout beyond rounding: a sentence each."""
        return layout_dependence(run, model)
