"""Which checkpoints stay in a run's folder. A removal leaves a valid checkpoint at every moment."""

import logging
import os
import shutil
from pathlib import Path

from mplug.checkpoint import MANIFEST, aside_of, complete, read_manifest, step_of, verify
from mplug.checkpoint.verified import Signature, Verified, signature_of
from mplug.errors import RunError, UsageError

log = logging.getLogger("mplug")


class Retention:
    """Keeps the newest `keep` checkpoints that are valid; a damaged one does not count.

    `base` is the checkpoint from which the run continues. Checkpoints of later steps belong to a course of the run that
    it has left. Used on rank 0 only.
    """

    def __init__(self, keep: int, verified: Verified) -> None:
        self.keep, self.verified, self.base = keep, verified, None
        self._damaged: dict[Path, Signature | None] = {}

    base: Path | None

    def before(self, final: Path) -> None:
        """Before a checkpoint becomes visible at `final`: remove those of steps after the base, which stays.

        One of the same step is replaced by the new one.
        """
        if os.path.lexists(final) and (final.is_symlink() or not final.is_dir()):
            _set_aside(final)  # only a folder can be replaced in place
        if final.exists():
            log.warning("replacing checkpoint '%s', which the run saves again", final)
        sweep(final.parent)
        base = self.base
        if base is None or base.parent != final.parent or not self._is_valid(base):
            return  # they may be the only valid ones
        for path in complete(final.parent):
            if step_of(path) > step_of(base) and path != final:
                log.warning("removing checkpoint '%s': the run continues from step %d", path, step_of(base))
                _set_aside(path)
        sync(final.parent)
        sweep(final.parent)

    def after(self, final: Path) -> None:
        """After a checkpoint became visible: remove those of later steps, and those older than the `keep` newest."""
        names = read_manifest(final)["files"]
        self.verified.note(final, names)
        self.base, valid = final, 0
        for path in reversed(complete(final.parent)):
            if step_of(path) > step_of(final):
                log.warning("removing checkpoint '%s': the run has saved step %d after it", path, step_of(final))
                _set_aside(path)
            elif valid == self.keep:
                _set_aside(path)
            elif self._is_valid(path):
                valid += 1
        sweep(final.parent)

    def _is_valid(self, path: Path) -> bool:
        """Whether a checkpoint's files match their checksums; each is read once, unless it changes."""
        signature = signature_of(path / MANIFEST)
        if path in self._damaged and self._damaged[path] == signature:
            return False
        try:
            manifest = read_manifest(path)
            unknown = self.verified.unknown(path, manifest["files"])
            verify(path, manifest, unknown)
        except (UsageError, RunError) as error:
            self._damaged[path] = signature
            log.warning("%s (it does not count towards checkpoint.keep)", error)
            return False
        self.verified.note(path, unknown)
        return True


def _set_aside(path: Path) -> None:
    """Rename a checkpoint, because one that is half removed must not be seen."""
    target, number = aside_of(path), 1
    while os.path.lexists(target):  # what resisted an earlier removal
        number += 1
        target = aside_of(path.with_name(f"{path.name}.{number}"))
    path.rename(target)


def sweep(folder: Path) -> None:
    """Remove what has been renamed aside or left there; a failure is logged, and the next save tries again."""
    for leftover in folder.glob(".step_*.partial"):
        try:
            if leftover.is_dir() and not leftover.is_symlink():
                shutil.rmtree(leftover)
            else:
                leftover.unlink()
        except OSError as error:
            log.warning("cannot remove '%s': %s", leftover, error)


def sync(path: Path) -> None:
    """Put a file, or the entries of a folder, on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
