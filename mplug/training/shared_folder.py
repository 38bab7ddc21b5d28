"""Whether the processes of a run on several machines see the same folder, to which all of them write checkpoints."""

import socket
import time
from contextlib import suppress
from uuid import uuid4

from mplug.distributed.launch import agreed
from mplug.errors import UsageError, listed
from mplug.run.run import Run

PATIENCE = 30.0
"""Seconds until a file of another machine is visible: network file systems cache the contents of folders."""


def refuse_unshared_folder(run: Run) -> None:
    """Raise UsageError, on every rank, if a rank does not see the folder in which rank 0 keeps its runs."""
    assert run.directory is not None
    folder, name = run.directory.parent, f".shared-{uuid4().hex}"
    if run.rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    mark = folder / agreed(name)
    deadline = time.monotonic() + PATIENCE
    while not (seen := mark.exists()) and time.monotonic() < deadline:
        time.sleep(0.2)
    found = run.gathered((socket.gethostname(), str(folder.resolve()), seen))
    if run.rank == 0:
        mark.unlink()
        with suppress(OSError):  # other runs are in it
            folder.rmdir()
    if blind := [f"rank {rank} on {host}" for rank, (host, _, seen) in enumerate(found) if not seen]:
        host, path, _ = found[0]
        raise UsageError(
            f"{listed(blind)} cannot see the folder '{path}' of rank 0 on {host}, where all ranks "
            f"write their parts of a checkpoint; start the run in a folder that all machines share"
        )
