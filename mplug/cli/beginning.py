"""The start of a training run: the lock of its folder, and the checkpoint or the weights that it starts from."""

from pathlib import Path
from typing import TYPE_CHECKING

from mplug.errors import RunError, UsageError

if TYPE_CHECKING:
    from mplug.checkpoint.newest_valid import ReadableCheckpoint
    from mplug.run.lock import Claim, Lock
    from mplug.run.run import Run
    from mplug.training.changes import Changes


def claim_existing(lock: "Lock", directory: Path | None, name: str | None) -> "Claim | None":
    """Take the lock of the run to continue, or of an existing run that has the name of the new run. None if neither."""
    from mplug.run.folder import RUNS
    from mplug.run.lock import FOLDER

    if directory is None and name is not None and (RUNS / name / FOLDER).is_dir():
        directory = RUNS / name
    return lock.take(directory) if directory is not None else None


def claim_new(lock: "Lock", run: "Run", name: str | None) -> "Claim":
    """Take the lock of a new run's folder. Without --name, append a number to a name that is in use."""
    from mplug.run.folder import new_directory

    assert run.directory is not None
    stamped = run.directory
    for number in range(2, 100):
        try:
            claim = lock.take(run.directory)
            break
        except UsageError:
            if name is not None:
                raise
            run.directory = stamped.with_name(f"{stamped.name}-{number}")
    else:
        raise UsageError(f"'{stamped}' and 98 numbered folders next to it exist already; add --name")
    new_directory(
        run.config, run.directory.name
    )  # refuses a run of this name that started and ended since the first check
    return claim


def newest_of(directory: Path, restarted: bool) -> Path | None:
    """The newest checkpoint. None if a launcher restarted the run before its first checkpoint: the run starts anew."""
    from mplug.checkpoint.folder import complete, newest

    folder = directory / "checkpoints"
    return None if restarted and not complete(folder) else newest(folder)


def readable_of(resume_from: Path | None) -> "ReadableCheckpoint | None":
    """The newest checkpoint with a valid manifest, before any process starts. The ranks read its files later."""
    if resume_from is None:
        return None
    from mplug.checkpoint.newest_valid import newest_readable  # imports pydantic

    return newest_readable(resume_from.parent)


def readable_after(error: RunError, run: "Run", newest: Path | None) -> "ReadableCheckpoint | None":
    """The checkpoint from which a run restarts after `error`. Raises `error` with a reason if it cannot restart."""
    try:
        readable = readable_of(newest)
    except UsageError as reason:
        raise UsageError(f"{error}; {reason}") from error
    steps = run.config.trainer.steps
    if readable is not None and readable.manifest["step"] >= steps:
        done = f"its {steps} steps are complete, and '{readable.path}' has the last one"
        raise RunError(f"{error}; the run is not restarted, because {done}") from error
    return readable


def changes_of(run: "Run", readable: "ReadableCheckpoint | None", allowed: tuple[str, ...]) -> "Changes":
    """The changes of the config since the checkpoint. UsageError for a change that the user must allow."""
    from mplug.training.changes import Changes, changes_on_resume, refuse_unknown_fields

    if readable is None:
        return Changes()
    refuse_unknown_fields(readable.manifest, run.config, allowed)
    return changes_on_resume(readable.path, readable.manifest, run, allowed)


def saved_since(run: "Run", before: "ReadableCheckpoint | None") -> int:
    """The step of the newest checkpoint. 0 if it is still the one from which the run continued, or if there is none."""
    from mplug.checkpoint.folder import complete

    paths = complete(run.checkpoints)
    newest = readable_of(paths[-1]) if paths else None
    if newest is None or (before is not None and newest.manifest == before.manifest):
        return 0
    return newest.manifest["step"]


def beginning(readable: "ReadableCheckpoint | None", weights: str | None) -> str:
    """Text about the start of a run: 'from step 100', 'with the weights of ...' or 'from scratch'."""
    if readable is not None:
        return f"from step {readable.manifest['step']}"
    return f"with the weights of {weights}" if weights is not None else "from scratch"
