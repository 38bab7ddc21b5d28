"""Which checkpoints stay in a run's folder. A removal leaves a valid checkpoint at every moment."""

import logging
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from mplug.checkpoint.folder import OtherVersion, complete, read_manifest, verify
from mplug.checkpoint.names import MANIFEST, aside_of, step_of
from mplug.checkpoint.verified import Signature, Verified, signature_of
from mplug.errors import RunError, UsageError
from mplug.files import sync_path

log = logging.getLogger("mplug")


class Retention:
    """Keeps the newest `keep` checkpoints that are valid; a damaged one does not count.

    One that another version of mplug has saved does not count either, and stays.

    `base` is the checkpoint from which the run continues. Checkpoints of later steps belong to a course of the run that
    it has left. Used on rank 0 only.
    """

    def __init__(self, keep: int, verified: Verified) -> None:
        self.keep, self.verified, self.base = keep, verified, None
        self._damaged: dict[Path, Signature | None] = {}
        self._valid: dict[Path, tuple[Signature | None, list[str]]] = {}  # of the manifest; the names of the files
        self._warned: set[Path] = set()

    base: Path | None

    def before(self, final: Path) -> None:
        """Before a checkpoint becomes visible at `final`: remove those of steps after the base, which stays.

        One of the same step is replaced by the new one.
        """
        if os.path.lexists(final) and (final.is_symlink() or not final.is_dir()):
            self._set_aside(final)  # only a folder can be replaced in place
        if final.exists():
            if self._is_other_versions(final):
                raise OtherVersion(f"checkpoint '{final}' is not replaced: another version of mplug has saved it")
            log.warning("replacing checkpoint '%s', which the run saves again", final)
        sweep(final.parent)
        base = self.base
        if base is None or base.parent != final.parent:
            return
        later = [path for path in complete(final.parent) if step_of(path) > step_of(base) and path != final]
        if not later or not self._is_valid(base):
            return  # they may be the only valid ones
        for path in later:
            self._remove(path, f"the run continues from step {step_of(base)}")
        sync_path(final.parent)
        sweep(final.parent)

    def after(self, final: Path, names: Iterable[str]) -> None:
        """After a checkpoint of these files became visible: remove later ones, and those older than the `keep` newest.

        What is valid is found out only where a removal depends on it.
        """
        self._forget(final)  # the version that it has replaced
        self._note_valid(final, signature_of(final / MANIFEST), list(names))
        self.base, valid = final, 0
        found = complete(final.parent)
        for path in found:
            if step_of(path) > step_of(final):
                self._remove(path, f"the run has saved step {step_of(final)} after it")
        kept = [path for path in found if step_of(path) <= step_of(final)]
        for path in reversed(kept if len(kept) > self.keep else []):
            if valid == self.keep:
                self._remove(path)
            elif self._is_valid(path):
                valid += 1
        sweep(final.parent)

    def _is_valid(self, path: Path) -> bool:
        """Whether a checkpoint's files match their checksums; each is read once, unless it changes."""
        signature = signature_of(path / MANIFEST)
        if path in self._damaged and self._damaged[path] == signature:
            return False
        if self._is_known_as_valid(path, signature):
            return True
        try:
            manifest = read_manifest(path)
            verify(path, manifest, self.verified.unknown(path, manifest["files"]))
        except (UsageError, RunError) as error:
            self._damaged[path] = signature
            log.warning("%s (it does not count towards checkpoint.keep)", error)
            return False
        self._note_valid(path, signature, list(manifest["files"]))
        return True

    def _is_known_as_valid(self, path: Path, signature: Signature | None) -> bool:
        """Whether a checkpoint was valid, and the disk has it unchanged."""
        before, names = self._valid.get(path, (None, []))
        return before is not None and before == signature and not self.verified.unknown(path, names)

    def _note_valid(self, path: Path, signature: Signature | None, names: list[str]) -> None:
        self._valid[path] = (signature, names)
        self.verified.note(path, names)

    def _is_other_versions(self, path: Path) -> bool:
        """Whether another version of mplug has saved a checkpoint, or may have: one that cannot be read stays, too."""
        if self._is_known_as_valid(path, signature_of(path / MANIFEST)):
            return False
        try:
            read_manifest(path)
        except (OtherVersion, RunError) as error:
            if path not in self._warned:
                log.warning("%s (it is not removed)", error)
            self._warned.add(path)
            return True
        except UsageError:
            return False
        return False

    def _remove(self, path: Path, reason: str = "") -> None:
        """Set a checkpoint aside, unless another version of mplug has saved it; a reason is logged."""
        if self._is_other_versions(path):
            return
        if reason:
            log.warning("removing checkpoint '%s': %s", path, reason)
        self._set_aside(path)

    def _set_aside(self, path: Path) -> None:
        """Rename a checkpoint, because one that is half removed must not be seen."""
        target, number = aside_of(path), 1
        while os.path.lexists(target):  # what resisted an earlier removal
            number += 1
            target = aside_of(path.with_name(f"{path.name}.{number}"))
        path.rename(target)
        self._forget(path)

    def _forget(self, path: Path) -> None:
        self._valid.pop(path, None)
        self._damaged.pop(path, None)
        self.verified.forget(path)


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
