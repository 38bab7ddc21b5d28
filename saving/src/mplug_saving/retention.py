"""Remove old checkpoints from a run's folder. A removal always leaves a valid checkpoint in the folder."""

import logging
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from mplug.errors import RunError, UsageError
from mplug.system.files import sync_path
from mplug_saving.folder import OtherVersion, complete, read_manifest, verify
from mplug_saving.names import MANIFEST, partial_path, step_of
from mplug_saving.verified import Signature, Verified, signature_of

log = logging.getLogger("mplug")


class Retention:
    """Keeps the newest `keep` valid checkpoints. Rank 0 alone uses it.

    Damaged checkpoints do not count. Checkpoints of another version of mplug do not count either, and are never
    removed.

    `base` is the checkpoint from which the run continued, or the last one that it saved. Checkpoints of later steps are
    obsolete, because the run continues from `base`.
    """

    def __init__(self, keep: int, verified: Verified) -> None:
        self.keep, self.verified, self.base = keep, verified, None
        self._damaged: dict[Path, Signature | None] = {}
        # The signature of each valid checkpoint's manifest, and the names of its files.
        self._valid: dict[Path, tuple[Signature | None, list[str]]] = {}
        self._warned: set[Path] = set()

    base: Path | None

    def before(self, final: Path) -> None:
        """Before a checkpoint becomes visible at `final`: remove checkpoints of steps after the base.

        The base stays. The new checkpoint replaces one of the same step.
        """
        if os.path.lexists(final) and (final.is_symlink() or not final.is_dir()):
            self._set_aside(final)  # only a folder can be replaced in place
        if final.exists():
            if self._is_other_versions(final):
                raise OtherVersion(
                    f"cannot replace checkpoint '{final}', because another version of mplug saved it; move it elsewhere"
                )
            log.warning("replacing checkpoint '%s': the run saves this step again", final)
        sweep(final.parent)
        base = self.base
        if base is None or base.parent != final.parent:
            return
        later = [path for path in complete(final.parent) if step_of(path) > step_of(base) and path != final]
        if not later or not self._is_valid(base):
            return  # the later checkpoints may be the only valid ones
        for path in later:
            self._remove(path, f"the run continues from the earlier step {step_of(base)}")
        sync_path(final.parent)
        sweep(final.parent)

    def after(self, final: Path, names: Iterable[str]) -> None:
        """After a checkpoint of these files became visible: remove later checkpoints, and older ones beyond `keep`.

        The method verifies a checkpoint only if a removal depends on the result.
        """
        self._forget(final)  # the checkpoint of the same step that it may have replaced
        self._note_valid(final, signature_of(final / MANIFEST), list(names))
        self.base, valid = final, 0
        paths = complete(final.parent)
        for path in paths:
            if step_of(path) > step_of(final):
                self._remove(path, f"the run has since saved the earlier step {step_of(final)}")
        kept = [path for path in paths if step_of(path) <= step_of(final)]
        for path in reversed(kept if len(kept) > self.keep else []):
            if valid == self.keep:
                self._remove(path)
            elif self._is_valid(path):
                valid += 1
        sweep(final.parent)

    def _is_valid(self, path: Path) -> bool:
        """Whether the files of a checkpoint match their checksums. A file is read again only after it has changed."""
        signature = signature_of(path / MANIFEST)
        if path in self._damaged and self._damaged[path] == signature:
            return False
        if self._is_known_as_valid(path, signature):
            return True
        try:
            manifest = read_manifest(path)
            verify(path, manifest, self.verified.unverified(path, manifest["files"]))
        except (UsageError, RunError) as error:
            self._damaged[path] = signature
            log.warning("%s (it does not count towards checkpoint.keep)", error)
            return False
        self._note_valid(path, signature, list(manifest["files"]))
        return True

    def _is_known_as_valid(self, path: Path, signature: Signature | None) -> bool:
        """Whether a checkpoint was valid and has not changed on the disk since."""
        previous, names = self._valid.get(path, (None, []))
        return previous is not None and previous == signature and not self.verified.unverified(path, names)

    def _note_valid(self, path: Path, signature: Signature | None, names: list[str]) -> None:
        self._valid[path] = (signature, names)
        self.verified.note(path, names)

    def _is_other_versions(self, path: Path) -> bool:
        """Whether another version of mplug saved a checkpoint. True also if the checkpoint cannot be read now."""
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
        """Set a checkpoint aside, unless another version of mplug saved it. A reason is logged."""
        if self._is_other_versions(path):
            return
        if reason:
            log.warning("removing checkpoint '%s': %s", path, reason)
        self._set_aside(path)

    def _set_aside(self, path: Path) -> None:
        """Rename a checkpoint before its removal, so that a partly removed checkpoint is not visible."""
        target, number = partial_path(path), 1
        while os.path.lexists(target):  # an earlier removal failed
            number += 1
            target = partial_path(path.with_name(f"{path.name}.{number}"))
        path.rename(target)
        self._forget(path)

    def _forget(self, path: Path) -> None:
        self._valid.pop(path, None)
        self._damaged.pop(path, None)
        self.verified.forget(path)


def sweep(folder: Path) -> None:
    """Remove checkpoints that were set aside or never completed. A failure is logged; the next save tries again."""
    for leftover in folder.glob(".step_*.partial"):
        try:
            if leftover.is_dir() and not leftover.is_symlink():
                shutil.rmtree(leftover)
            else:
                leftover.unlink()
        except OSError as error:
            log.warning("cannot remove '%s': %s", leftover, error)
