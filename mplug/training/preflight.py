"""What the host asks of the package that compares a run with its machine before it starts. Imports no torch."""

from typing import Protocol

from mplug.distributed.world import World
from mplug.model.model import Model
from mplug.run.run import Run


class Preflight(Protocol):
    """The methods of the class in the entry-point group 'mplug.preflights'.

    The host calls them before a process starts, with the model on the meta device. Without an installed class, a run
    that does not fit its machine fails when it needs the memory.
    """

    def refuse(self, run: Run, model: Model, world: World | None) -> None:
        """Raise UsageError if this machine cannot hold the least that the run needs."""

    def about_steps(self, run: Run, model: Model, world: World | None, done: int) -> list[str]:
        """Lines about the steps after the first `done` ones. Called on the process that announces the run."""

    def about_memory(self, run: Run, model: Model, world: World | None) -> list[str]:
        """Lines about the memory that the run needs; UsageError if it does not fit. The last call with the model.

        The model may get tensors without memory.
        """
