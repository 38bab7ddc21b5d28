"""What the host asks of the plugin by which a run goes on after a process has died (hook `heal`)."""

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from mplug.config.sources import Settings
    from mplug.distributed.world import World
    from mplug.run.launching import Healing
    from mplug.run.run import Run
    from mplug.training.saving import Position


class Healer(Protocol):
    """Keeps copies of a run's state in the memory of its processes, and continues the run from them.

    After a death, the launcher lets the remaining processes do their work again, as another world (`Healing`). What
    must outlive that is in `Run.kept`.
    """

    def plan(self, run: "Run", world: "World | None", base: "Settings", overrides: "Settings") -> "Healing":
        """How the run goes on after a process has died. Called in `mplug train`, on the meta device.

        `base` and `overrides` are the settings of the run, and `world` is that of another launcher. UsageError if the
        run cannot go on after a death.
        """

    def restore(self, run: "Run", position: "Position") -> bool:
        """Continue the run from the copies in its processes. Collective; called before a run begins or is resumed.

        False if no process has a copy, or if the processes lack a part of the state: the run then begins, or continues
        from its newest checkpoint.
        """

    def is_due(self, run: "Run") -> bool:
        """Whether to copy the state after the step `run.step`; the same on all ranks."""

    def keep(self, run: "Run", position: "Position") -> None:
        """Copy the state after the step `run.step`. Collective. No step, save or evaluation is under way.

        Called if `is_due` says so, and before each save but the last: a run that goes on from copies repeats no step
        that a checkpoint has. After the last step it is not called: a death in the last save repeats that step, with
        its evaluation and its save.
        """


def healer_of(run: "Run") -> Healer | None:
    """The object of the plugin that heals this run; None if the config names no such plugin."""
    found: Healer | None = run.hooks.call.heal(run=run)
    return found
