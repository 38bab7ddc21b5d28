"""When a run saves: every so many steps, or as a package decides (`checkpoint.every=auto`)."""

from typing import Protocol

from mplug.registry.provided import needed
from mplug.run.run import Run


class SaveTimes(Protocol):
    """The methods of the class in the entry-point group 'mplug.save_times'."""

    def is_due(self, run: Run) -> bool:
        """Whether the step that has just ended is to be saved; the same on all ranks. Called after every step."""

    def saved(self, run: Run, stall: float, durable: float) -> None:
        """A save that was due has stopped training for `stall` seconds. Collective.

        `durable` is the expected time in seconds from its begin until the checkpoint is complete.
        """

    def exclude(self, seconds: float) -> None:
        """Training has paused for so many seconds, for a change of the layout or a copy of the state."""


class EverySteps:
    """Saves every `steps` steps; never if it is 0."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def is_due(self, run: Run) -> bool:
        """Whether the number of the step is a multiple."""
        return self.steps > 0 and run.step % self.steps == 0

    def saved(self, run: Run, stall: float, durable: float) -> None:
        """Do nothing: the interval is fixed."""

    def exclude(self, seconds: float) -> None:
        """Do nothing: the interval is fixed."""


def save_times_of(run: Run) -> SaveTimes:
    """When a run saves. UsageError for `checkpoint.every=auto` without a package that serves it."""
    every = run.config.checkpoint.every
    if every != "auto":
        return EverySteps(every)
    found: SaveTimes = needed("save_times", "checkpoint.every=auto", "mplug-heal")
    return found
