"""What the host asks about the checkpoints of a run (`mplug.training.saving.Saving`). Imports no torch."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from mplug.errors import RunError, UsageError
from mplug_saving.claiming import claim_existing, claim_new
from mplug_saving.folder import complete, newest
from mplug_saving.lock import Claim, Lock
from mplug_saving.names import ELSEWHERE

if TYPE_CHECKING:
    from mplug.model.model import Model
    from mplug.run.run import Run
    from mplug.training.assembly import Parts
    from mplug_saving.changes import Changes
    from mplug_saving.newest_valid import ReadableCheckpoint
    from mplug_saving.position import Position


class Saving:
    """The class of the entry-point group 'mplug.savers'."""

    def lock(self, notify: Callable[[str], None]) -> Lock:
        """What holds the lock of the run in a block."""
        return Lock(notify)

    def claim_existing(self, lock: Lock, directory: Path | None, name: str | None) -> Claim | None:
        """Take the lock of the run to continue, or of an existing run with the name of the new one."""
        return claim_existing(lock, directory, name)

    def claim_new(self, lock: Lock, run: "Run", name: str | None) -> Claim:
        """Take the lock of a new run's folder, and choose another folder if its name is in use and not the user's."""
        return claim_new(lock, run, name)

    def newest(self, directory: Path, restarted: bool) -> Path | None:
        """The newest checkpoint of a run. UsageError if it has none; None if a launcher or --restarts started it anew.

        Such a run may have ended before its first checkpoint. None also if it is saved elsewhere: on local disks.
        """
        folder, needs_none = directory / "checkpoints", restarted or (directory / ELSEWHERE).is_file()
        return None if needs_none and not complete(folder) else newest(folder)

    def readable(self, path: Path | None) -> "ReadableCheckpoint | None":
        """The newest checkpoint with a valid manifest beside `path`. The ranks read its files later."""
        if path is None:
            return None
        from mplug_saving.newest_valid import newest_readable  # imports pydantic

        return newest_readable(path.parent)

    def readable_after(self, error: RunError, run: "Run", path: Path | None) -> "ReadableCheckpoint | None":
        """The checkpoint from which a run restarts after `error`. Raises `error` with a reason if it cannot restart."""
        try:
            readable = self.readable(path)
        except UsageError as reason:
            raise UsageError(f"{error}; {reason}") from error
        steps = run.config.trainer.steps
        if readable is not None and readable.manifest["step"] >= steps:
            done = f"its {steps} steps are complete, and '{readable.path}' has the last one"
            raise RunError(f"{error}; the run is not restarted, because {done}") from error
        return readable

    def saved_since(self, run: "Run", before: "ReadableCheckpoint | None") -> int:
        """The step of the newest checkpoint; 0 if it is the one from which the run continued, or if there is none."""
        paths = complete(run.checkpoints)
        found = self.readable(paths[-1]) if paths else None
        if found is None or (before is not None and found.manifest == before.manifest):
            return 0
        return found.manifest["step"]

    def changes(self, run: "Run", readable: "ReadableCheckpoint | None", allowed: tuple[str, ...]) -> "Changes":
        """The changes of the config since the checkpoint. UsageError for a change that the user must allow."""
        from mplug_saving.changes import Changes, changes_on_resume, refuse_unknown_fields  # imports pydantic

        if readable is None:
            return Changes()
        refuse_unknown_fields(readable.manifest, run.config, allowed)
        return changes_on_resume(readable.path, readable.manifest, run, allowed)

    def refuse_model(
        self, run: "Run", model: "Model", readable: "ReadableCheckpoint | None", changes: "Changes"
    ) -> None:
        """Raise UsageError if a checkpoint cannot hold the states of the run, or if the model forbids a change."""
        from mplug_saving.changes import refuse_other_micro_batches
        from mplug_saving.states import refuse_unsavable_states

        refuse_other_micro_batches(model, changes)
        refuse_unsavable_states(run, model, readable.path if readable else None)

    def position(self, run: "Run", parts: "Parts") -> "Position":
        """The position of a run, which saves and loads itself. Collective."""
        from mplug_saving.position import Position

        return Position(run, parts)
