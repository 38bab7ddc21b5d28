"""What a plugin gives the host if each machine of a run may have a run folder of its own."""

from pathlib import Path
from typing import Protocol


class Gatherer(Protocol):
    """Joins the parts of checkpoints that the machines of a run have written (hook `gather_checkpoints`)."""

    def complete(self, directory: Path) -> None:
        """Make the run's folder on this machine one from which the run can continue.

        Afterwards its newest checkpoint is the newest one that the plugin has joined, with all files, and no part of a
        later one is visible. One process on each machine calls it, before it reads the folder.
        """
