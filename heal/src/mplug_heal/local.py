"""The extension `local_checkpoints`: checkpoints on the disks of the machines, each with a copy on another machine."""

from pathlib import Path
from typing import TYPE_CHECKING

from mplug import hookimpl
from mplug.errors import UsageError
from mplug_heal.local_config import LocalConfig

if TYPE_CHECKING:
    from mplug.config.binding import RunConfig
    from mplug.run.run import Run
    from mplug.training.healing import Copies
    from mplug.training.saving import Position
    from mplug_heal.local_saves import LocalSaves


class LocalCheckpoints:
    """Saves a run often on the local disks of its machines, and continues it from there after a failure."""

    source = ""
    Config = LocalConfig

    def __init__(self, config: LocalConfig) -> None:
        self.config = config
        self._saves: LocalSaves | None = None

    @hookimpl
    def configure(self, config: "RunConfig") -> None:
        """Refuse a relative folder."""
        folder = self.config.folder
        if not folder.startswith(("/", "~", "$")):
            raise UsageError(
                f"extensions.local_checkpoints.folder='{folder}' is relative to the folder where the run starts, which "
                f"machines often share; name an absolute path on the local disk of each machine"
            )

    @hookimpl
    def copies(self, run: "Run") -> "Copies":
        """This object: it is a `Copies`."""
        return self

    def restore(
        self, run: "Run", position: "Position", newest: Path | None = None, allowed: tuple[str, ...] = ()
    ) -> bool:
        """Continue after the newest step whose parts are all on the local disks."""
        from mplug_heal.copies import saved_position
        from mplug_heal.local_saves import LocalSaves

        found = saved_position(position, "extensions.local_checkpoints")
        if self._saves is None:
            self._saves = LocalSaves(run, self.config)
        source = self._saves.restore(run, found, newest, allowed)
        self.source = source or ""
        return source is not None

    def is_due(self, run: "Run", saves: bool) -> bool:
        """Whether to save this step locally."""
        assert self._saves is not None
        return self._saves.is_due(run)

    def keep(self, run: "Run", position: "Position") -> None:
        """Save this step locally."""
        from mplug_heal.copies import saved_position

        assert self._saves is not None
        self._saves.save(run, saved_position(position, "extensions.local_checkpoints"))

    @hookimpl
    def run_finished(self, run: "Run") -> None:
        """Wait for what is being written. After the last step, its checkpoint takes the place of the local ones."""
        if self._saves is not None:
            self._saves.finish(run)
