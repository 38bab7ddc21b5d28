"""Compares a run with its machine before it starts (`mplug.training.preflight.Preflight`)."""

from typing import TYPE_CHECKING

from mplug_estimates.memory_check import check_memory
from mplug_estimates.size_limits import refuse_beyond_memory
from mplug_estimates.step_estimate import about_step, recipe_gaps

if TYPE_CHECKING:
    from mplug.distributed.world import World
    from mplug.model.model import Model
    from mplug.run.run import Run


class Preflight:
    """The class of the entry-point group 'mplug.preflights'."""

    def refuse(self, run: "Run", model: "Model", world: "World | None") -> None:
        """Refuse sizes that exceed all memory of the machine."""
        refuse_beyond_memory(run, model, world)

    def about_steps(self, run: "Run", model: "Model", world: "World | None", done: int) -> list[str]:
        """What a step is, how long it takes at least, and what the recipe needs that the machine lacks."""
        return [about_step(run, model, world, done), *recipe_gaps(run, world)]

    def about_memory(self, run: "Run", model: "Model", world: "World | None") -> list[str]:
        """Compare the estimate of the run's memory with that of the machine."""
        return check_memory(run, model, world)
