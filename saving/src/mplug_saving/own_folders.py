"""Checkpoints of a run whose machines have no common folder: each machine keeps the parts that its ranks have written.

A plugin joins the parts (hook `gather_checkpoints`). Rank 0 decides the manifest; the ranks of other machines write it
beside their parts, so that the plugin knows what it copies. A folder with parts counts as damaged until the plugin has
completed it.
"""

import logging
import shutil
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

from mplug_saving.folder import complete
from mplug_saving.names import MANIFEST, SUFFIX, partial_path, step_of

log = logging.getLogger("mplug")


def prefix_of(rank: int) -> str:
    """How the names of the files of a rank begin: 'rank00003.'."""
    return f"rank{rank:05d}."


def make_partial(final: Path) -> None:
    """Create the folder in which the ranks of this machine write their parts."""
    partial_path(final).mkdir(parents=True, exist_ok=True)


def add_part(final: Path, rank: int, manifest: str) -> None:
    """Make this rank's part and the manifest visible on this machine, after rank 0 has done so on its own.

    Several ranks of a machine do this at the same time. What an earlier attempt has left at the step is replaced.
    """
    partial = partial_path(final)
    final.mkdir(parents=True, exist_ok=True)
    for path in partial.glob(f"{prefix_of(rank)}*"):
        path.replace(final / _named_in(manifest, path.name))
    temporary = final / f".{MANIFEST}.{rank}.partial"
    temporary.write_text(manifest)
    temporary.replace(final / MANIFEST)
    for path in final.glob(f"{prefix_of(rank)}*"):
        if f'"{path.name}"' not in manifest:  # of an earlier save of this step
            path.unlink()
    with suppress(OSError):  # another rank of this machine has not moved its part yet
        partial.rmdir()


def _named_in(manifest: str, name: str) -> str:
    """The name of a written file in the manifest: 'rank00003.2.safetensors' if the step was saved before."""
    if f'"{name}"' in manifest:
        return name
    stem, number = name.removesuffix(SUFFIX), 2
    while f'"{stem}.{number}{SUFFIX}"' not in manifest:
        number += 1
    return f"{stem}.{number}{SUFFIX}"


def keep_parts(final: Path, keep: int) -> None:
    """Remove the parts of steps after `final` and of all but the `keep` newest, and what earlier saves have left.

    Another rank of this machine may still move its part of this step, or begin to save the next one.
    """
    paths = complete(final.parent)
    later = [path for path in paths if step_of(path) > step_of(final)]
    kept = [path for path in paths if step_of(path) <= step_of(final)]
    for path in [*later, *kept[:-keep]]:
        remove_parts(path)
    for left in final.parent.glob(".step_*.partial"):
        if step_of_partial(left) < step_of(final):
            shutil.rmtree(left, ignore_errors=True)


def remove_parts(path: Path) -> None:
    """Remove a checkpoint from this machine; it is invisible at once. A failure is logged."""
    set_aside = path.with_name(f".{path.name}.{uuid4().hex}.partial")
    try:
        path.rename(set_aside)
        shutil.rmtree(set_aside)
    except OSError as error:
        log.warning("cannot remove '%s': %s", path, error)


def step_of_partial(path: Path) -> int:
    """The step of an incomplete checkpoint: of '.step_00000100.partial'."""
    return int(path.name.split(".")[1].removeprefix("step_"))
