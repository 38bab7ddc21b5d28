"""Find out whether the processes of a run on several machines share the folder to which they write checkpoints."""

import socket
import time
from contextlib import suppress
from uuid import uuid4

from mplug.errors import UsageError, listed
from mplug.run.launching import agreed
from mplug.run.run import Run

PATIENCE = 30.0
"""Seconds until a file of another machine is visible: network file systems cache the contents of folders."""


def refuse_unshared_folder(run: Run) -> None:
    """Raise UsageError, on every rank, if a rank does not see the folder in which rank 0 keeps its runs."""
    reports = _reports(run, PATIENCE)
    if missing := [f"rank {rank} on {host}" for rank, (host, _, visible) in enumerate(reports) if not visible]:
        host, path, _ = reports[0]
        raise UsageError(
            f"{listed(missing)} cannot see the folder '{path}' of rank 0 on {host}, where all ranks "
            f"write their parts of a checkpoint; start the run in a folder that all machines share, or name an "
            f"extension that joins the parts (hook gather_checkpoints)"
        )


def find_own_folders(run: Run) -> None:
    """Set whether the ranks share the folder of rank 0; a plugin joins the checkpoints of those that do not.

    Two folders with the same inode number may be one, which a network file system may show late.
    """
    assert run.directory is not None
    folder = run.directory.parent
    folder.mkdir(parents=True, exist_ok=True)
    same = folder.stat().st_ino == agreed(folder.stat().st_ino)
    reports = _reports(run, PATIENCE if same else 0.0)
    run.shared_folder, run.sees_first_folder = all(visible for _, _, visible in reports), reports[run.rank][2]


def _reports(run: Run, seconds: float) -> list[tuple[str, str, bool]]:
    """(host, folder of runs, whether it is that of rank 0) of each rank, after at most so many seconds."""
    assert run.directory is not None
    folder, name = run.directory.parent, f".shared-{uuid4().hex}"
    if run.rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    mark = folder / agreed(name)
    deadline = time.monotonic() + seconds
    while not (visible := mark.exists()) and time.monotonic() < deadline:
        time.sleep(0.2)
    reports = run.gathered((socket.gethostname(), str(folder.resolve()), visible))
    if run.rank == 0:
        mark.unlink()
        with suppress(OSError):  # the folder holds other runs
            folder.rmdir()
    return reports
