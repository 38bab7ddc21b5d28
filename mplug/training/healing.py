"""What the host asks of plugins by which a run continues from copies of its state outside its checkpoints."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from mplug.config.sources import Settings
    from mplug.distributed.world import World
    from mplug.run.launching import Healing
    from mplug.run.run import Run
    from mplug.training.saving import Position


class Copies(Protocol):
    """Copies of a run's state, such as those in the memory of its processes or on the disks of its machines."""

    source: str
    """Where the copies are from which the run has continued, as messages name it."""

    def restore(self, run: "Run", position: "Position", newest: Path | None, allowed: tuple[str, ...] = ()) -> bool:
        """Continue the run from its copies, before it begins or is resumed. Collective.

        False if there are no complete copies, or if the checkpoint `newest` is newer. `allowed` fields may change.
        """

    def is_due(self, run: "Run", saves: bool) -> bool:
        """Whether to copy the state after the step `run.step`; the same on all ranks.

        `saves` says whether a save follows, or a copy of a plugin that comes later in `copies_of`.
        """

    def keep(self, run: "Run", position: "Position") -> None:
        """Copy the state after the step `run.step`. Collective. No step, save or evaluation is under way.

        Not called after the last step: a death in the last save repeats the step, with its evaluation and its save.
        """


class Healer(Copies, Protocol):
    """Keeps copies of a run's state in the memory of its processes, and continues the run from them.

    After a death, the launcher lets the remaining processes do their work again, as another world (`Healing`). What
    must outlive that is in `Run.kept`. A copy is due at the beginning and before each save.
    """

    def plan(self, run: "Run", world: "World | None", base: "Settings", overrides: "Settings") -> "Healing":
        """How the run goes on after a process has died. Called in `mplug train`, on the meta device.

        `base` and `overrides` are the settings of the run, and `world` is that of another launcher. UsageError if the
        run cannot go on after a death.
        """


def healer_of(run: "Run") -> Healer | None:
    """The object of the plugin that heals this run; None if the config names no such plugin."""
    found: Healer | None = run.hooks.call.heal(run=run)
    return found


def copies_of(run: "Run") -> Sequence[Copies]:
    """The objects of all plugins that copy the state of this run, in the order in which it continues from them."""
    healer = healer_of(run)
    return [*([] if healer is None else [healer]), *(found for _, found in run.hooks.each("copies", run=run))]


def due_copies(copies: Sequence[Copies], run: "Run", saves: bool) -> list[Copies]:
    """The copies to make after a step; `saves` says whether the run saves it."""
    due: list[Copies] = []
    for one in reversed(copies):
        due = [one, *due] if one.is_due(run, saves or bool(due)) else due
    return due
