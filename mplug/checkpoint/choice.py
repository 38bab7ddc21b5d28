"""The newest valid checkpoint, from which a run continues; those that it skips, and why."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from mplug.checkpoint.folder import (
    REMEDY,
    OtherVersion,
    complete,
    is_named_as_checkpoint,
    newest,
    read_manifest,
    verify,
)
from mplug.checkpoint.names import step_of
from mplug.checkpoint.opened import Opened, open_together
from mplug.checkpoint.together import from_rank, raise_alike
from mplug.checkpoint.verified import Verified
from mplug.errors import RunError, UsageError

if TYPE_CHECKING:
    from mplug.checkpoint.manifest import Facts
    from mplug.run.run import Run


@dataclass(frozen=True)
class Choice:
    """A checkpoint, and why each newer one was skipped."""

    path: Path
    manifest: "Facts"
    skipped: tuple[str, ...] = ()

    def lines(self, use: str = "continuing from") -> list[str]:
        """What to report: nothing where no checkpoint was skipped. `use` is what is done with the chosen step."""
        if not self.skipped:
            return []
        return [*(f"skipped: {reason}" for reason in self.skipped), f"{use} step {step_of(self.path)}"]


@dataclass(frozen=True)
class Chosen(Choice):
    """A checkpoint that all ranks have chosen together."""

    opened: Opened = field(kw_only=True)


def newest_readable(folder: Path) -> Choice:
    """The newest checkpoint whose manifest is valid and whose files have the right sizes; reads no tensor.

    UsageError where there is none, or where another version of mplug has saved a newer one.
    """
    skipped: list[str] = []
    for path in reversed(complete(folder)):
        try:
            return Choice(path, read_manifest(path), tuple(skipped))
        except OtherVersion:
            raise
        except UsageError as error:
            skipped.append(str(error).removesuffix(REMEDY))
    if not skipped:
        newest(folder)  # raises
    raise _none_is_valid(folder, skipped)


def choose(run: "Run", path: Path, verified: Verified) -> Chosen:
    """The newest valid checkpoint of a folder that is not newer than `path`; all ranks choose the same.

    Of the files of a checkpoint, each rank reads its share. What they find goes to `verified`. Raises UsageError where
    none is valid or another version of mplug has saved one, and RunError where ranks do not see the same.
    """
    skipped: list[str] = []
    for candidate in from_rank(run, 0, _not_newer(path) if run.rank == 0 else []):
        try:
            opened = _open_valid(run, candidate, verified)
        except OtherVersion:
            raise
        except UsageError as fault:  # the same on all ranks
            skipped.append(str(fault).removesuffix(REMEDY))
            continue
        return Chosen(candidate, opened.facts, tuple(skipped), opened=opened)
    raise _none_is_valid(path.parent, skipped)


def _open_valid(run: "Run", path: Path, verified: Verified) -> Opened:
    """A checkpoint whose files match their checksums. If a save replaces it meanwhile, the new one."""
    opened = open_together(run, path)
    while True:
        try:
            _refuse_damaged_share(run, opened, verified)
            return opened
        except (UsageError, RunError):  # the same on all ranks
            newer = open_together(run, path)
            if newer.checksum == opened.checksum:
                raise
            opened = newer


def _refuse_damaged_share(run: "Run", opened: Opened, verified: Verified) -> None:
    """Raise on all ranks if files of the checkpoint do not match their checksums; each rank reads its share of them."""
    error, names = None, list(opened.share["files"])
    try:
        verify(opened.path, opened.share, verified.unknown(opened.path, names))
    except (UsageError, RunError) as raised:
        error = raised
    raise_alike(run, error)
    verified.note(opened.path, opened.index.files if run.rank == 0 else names)  # the other ranks have read the others


def _not_newer(path: Path) -> list[Path]:
    """A checkpoint, and those before it in its folder, the newest first."""
    if not is_named_as_checkpoint(path):
        return [path]
    older = [other for other in complete(path.parent) if step_of(other) < step_of(path)]
    return [path, *reversed(older)]


def _none_is_valid(folder: Path, reasons: list[str]) -> UsageError:
    found = "\n".join(f"  {reason}" for reason in reasons)
    return UsageError(f"no checkpoint in '{folder}' is valid:\n{found}\nrestore one of them, or begin a new run")
