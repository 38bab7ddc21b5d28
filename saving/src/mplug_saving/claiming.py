"""Take the lock of the folder of a run that starts."""

from pathlib import Path
from typing import TYPE_CHECKING

from mplug.errors import UsageError

if TYPE_CHECKING:
    from mplug.run.run import Run
    from mplug_saving.lock import Claim, Lock


def claim_existing(lock: "Lock", directory: Path | None, name: str | None) -> "Claim | None":
    """Take the lock of the run to continue, or of an existing run that has the name of the new run. None if neither."""
    from mplug.run.folder import RUNS
    from mplug_saving.lock import FOLDER

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
