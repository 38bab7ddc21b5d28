"""What the host asks of the package that changes the layout of a run while it trains."""

from typing import Protocol

from mplug.run.run import Run
from mplug.training.saving import Position


class Relayouts(Protocol):
    """The methods of the class in the entry-point group 'mplug.relayouts'.

    Without an installed class, a run keeps its layout until it is resumed.
    """

    def is_requested(self, run: Run) -> bool:
        """Whether a user has asked for another layout. Called on rank 0 when a step begins; takes microseconds."""

    def change(self, run: Run, position: Position) -> None:
        """Change the layout of a run, or refuse the request. Called on all ranks together, between two steps.

        No step, save or evaluation is under way. The method replaces `position.parts`, and what `Run.become` replaces.
        If it refuses, both stay as they are. UsageError and RunError end the run.
        """
