"""Choose the newest valid checkpoint to continue from, and report the newer ones that are skipped."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from mplug.errors import RunError, UsageError
from mplug_saving.folder import (
    REMEDY,
    OtherVersion,
    complete,
    is_named_as_checkpoint,
    newest,
    read_manifest,
    verify,
)
from mplug_saving.names import step_of
from mplug_saving.opened import Opened, open_together
from mplug_saving.rank_exchanges import from_rank, raise_alike
from mplug_saving.verified import Verified

if TYPE_CHECKING:
    from mplug.run.run import Run
    from mplug_saving.manifest import Facts


@dataclass(frozen=True)
class ReadableCheckpoint:
    """A checkpoint to continue from, with the reason why each newer one was skipped."""

    path: Path
    manifest: "Facts"
    skipped: tuple[str, ...] = ()

    def lines(self, use: str = "continuing from") -> list[str]:
        """The messages to print; empty if no checkpoint was skipped. `use` says what happens with the chosen step."""
        if not self.skipped:
            return []
        return [*(f"skipped: {reason}" for reason in self.skipped), f"{use} step {step_of(self.path)}"]


@dataclass(frozen=True)
class AgreedCheckpoint(ReadableCheckpoint):
    """A checkpoint that all ranks have chosen together."""

    opened: Opened = field(kw_only=True)


def newest_readable(folder: Path) -> ReadableCheckpoint:
    """The newest checkpoint whose manifest is valid and whose files have the sizes that it states. Reads no tensor.

    Raises UsageError if there is none, or if another version of mplug saved a newer one.
    """
    skipped: list[str] = []
    for path in reversed(complete(folder)):
        try:
            return ReadableCheckpoint(path, read_manifest(path), tuple(skipped))
        except OtherVersion:
            raise
        except UsageError as error:
            skipped.append(str(error).removesuffix(REMEDY))
    if not skipped:
        newest(folder)  # raises
    raise _none_is_valid(folder, skipped)


def choose(run: "Run", path: Path, verified: Verified) -> AgreedCheckpoint:
    """The newest valid checkpoint in the folder of `path` that is not newer than `path`; the same on all ranks.

    The ranks divide the files of a checkpoint among them, and compare the checksums. `verified` notes the valid files.
    Raises UsageError if no checkpoint is valid or another version of mplug saved one. Raises RunError if the ranks read
    different checkpoints.
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
        return AgreedCheckpoint(candidate, opened.facts, tuple(skipped), opened=opened)
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
        verify(opened.path, opened.share, verified.unverified(opened.path, names))
    except (UsageError, RunError) as raised:
        error = raised
    raise_alike(run, error)
    verified.note(opened.path, opened.index.files if run.rank == 0 else names)  # the other ranks have read the others


def _not_newer(path: Path) -> list[Path]:
    """A checkpoint and the earlier ones in its folder, newest first."""
    if not is_named_as_checkpoint(path):
        return [path]
    older = [other for other in complete(path.parent) if step_of(other) < step_of(path)]
    return [path, *reversed(older)]


def _none_is_valid(folder: Path, reasons: list[str]) -> UsageError:
    lines = "\n".join(f"  {reason}" for reason in reasons)
    return UsageError(f"no checkpoint in '{folder}' is valid:\n{lines}\nrestore one of them, or start a new run")
