"""Where a training run begins: the lock of its folder, and the checkpoint or the weights that it continues."""

from pathlib import Path
from typing import TYPE_CHECKING

from mplug.errors import RunError, UsageError

if TYPE_CHECKING:
    from mplug.checkpoint.choice import Choice
    from mplug.run.lock import Claim, Lock
    from mplug.run.run import Run
    from mplug.training.changes import Changes


def claim_existing(lock: "Lock", directory: Path | None, name: str | None) -> "Claim | None":
    """Take the lock of a run that is continued, or of one that has the name of a new run and is under way."""
    from mplug.run.folder import RUNS
    from mplug.run.lock import FOLDER

    if directory is None and name is not None and (RUNS / name / FOLDER).is_dir():
        directory = RUNS / name
    return lock.take(directory) if directory is not None else None


def claim_new(lock: "Lock", run: "Run", name: str | None) -> "Claim":
    """Take the lock of a new run's folder. A run without --name takes another one if two start in the same second."""
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
        raise UsageError(f"'{stamped}' and 98 folders beside it are taken; give the run a --name")
    new_directory(run.config, run.directory.name)  # it may have begun, and ended, since its name was checked
    return claim


def newest_of(directory: Path, restarted: bool) -> Path | None:
    """The newest checkpoint; a restarted run that had none yet begins again."""
    from mplug.checkpoint.folder import complete, newest

    folder = directory / "checkpoints"
    return None if restarted and not complete(folder) else newest(folder)


def readable_of(resume_from: Path | None) -> "Choice | None":
    """The newest checkpoint by its manifest, before any process starts; the ranks then read the files together."""
    if resume_from is None:
        return None
    from mplug.checkpoint.choice import newest_readable  # imports pydantic

    return newest_readable(resume_from.parent)


def readable_after(error: RunError, run: "Run", newest: Path | None) -> "Choice | None":
    """The checkpoint from which a run is restarted after an error, which is raised where that is not possible."""
    try:
        readable = readable_of(newest)
    except UsageError as none:
        raise UsageError(f"{error}; {none}") from error
    steps = run.config.trainer.steps
    if readable is not None and readable.manifest["step"] >= steps:
        done = f"its {steps} steps are done, and '{readable.path}' holds the last"
        raise RunError(f"{error}; the run is not restarted: {done}") from error
    return readable


def changes_of(run: "Run", readable: "Choice | None", allowed: tuple[str, ...]) -> "Changes":
    """What the run changes since its checkpoint; UsageError for what the user has not allowed."""
    from mplug.training.changes import Changes, changes_on_resume, refuse_unknown_fields

    if readable is None:
        return Changes()
    refuse_unknown_fields(readable.manifest, run.config, allowed)
    return changes_on_resume(readable.path, readable.manifest, run, allowed)


def saved_since(run: "Run", before: "Choice | None") -> int:
    """The step of the newest checkpoint, if it is not the one from which the run has continued; else 0."""
    from mplug.checkpoint.folder import complete

    found = complete(run.checkpoints)
    now = readable_of(found[-1]) if found else None
    if now is None or (before is not None and now.manifest == before.manifest):
        return 0
    return now.manifest["step"]


def beginning(readable: "Choice | None", pretrained: Path | None) -> str:
    """Where a run begins, in words."""
    if readable is not None:
        return f"from step {readable.manifest['step']}"
    return f"with the weights of '{pretrained}'" if pretrained is not None else "from scratch"
