"""Choose the newest valid checkpoint to continue from, and report the newer ones that are skipped."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mplug.checkpoint.folder import (
    REMEDY,
    OtherVersion,
    complete,
    is_named_as_checkpoint,
    newest,
    read_manifest,
    read_valid,
)
from mplug.checkpoint.names import step_of
from mplug.checkpoint.verified import Verified
from mplug.errors import RunError, UsageError

if TYPE_CHECKING:
    from mplug.checkpoint.manifest import Manifest
    from mplug.run.run import Run


@dataclass(frozen=True)
class Choice:
    """A checkpoint to continue from, with the reason why each newer one was skipped."""

    path: Path
    manifest: "Manifest"
    skipped: tuple[str, ...] = ()

    def lines(self, use: str = "continuing from") -> list[str]:
        """The messages to print; empty if no checkpoint was skipped. `use` says what happens with the chosen step."""
        if not self.skipped:
            return []
        return [*(f"skipped: {reason}" for reason in self.skipped), f"{use} step {step_of(self.path)}"]


def newest_readable(folder: Path) -> Choice:
    """The newest checkpoint whose manifest is valid and whose files have the sizes that it states. Reads no tensor.

    Raises UsageError if there is none, or if another version of mplug saved a newer one.
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


def choose(run: "Run", path: Path, verified: Verified) -> Choice:
    """The newest valid checkpoint in the folder of `path` that is not newer than `path`; the same on all ranks.

    The ranks divide the files of a checkpoint among them, and compare the checksums. `verified` notes the valid files.
    Raises UsageError if no checkpoint is valid or another version of mplug saved one. Raises RunError if the ranks read
    different checkpoints.
    """
    skipped: list[str] = []
    for candidate in run.gathered(_not_newer(path))[0]:
        manifest, error = _check(run, candidate, verified)
        try:
            raise_alike(run, error)
        except OtherVersion:
            raise
        except UsageError as fault:
            skipped.append(str(fault).removesuffix(REMEDY))
            continue
        same_everywhere(run, candidate, manifest)
        assert manifest is not None
        if run.rank == 0:
            verified.note(candidate, manifest["files"])  # the other ranks have read their shares
        return Choice(candidate, manifest, tuple(skipped))
    raise _none_is_valid(path.parent, skipped)


def share_of(run: "Run", files: Iterable[str]) -> list[str]:
    """The files of a checkpoint that this rank verifies when all ranks verify it together."""
    return sorted(files)[run.rank :: run.mesh.world_size]


def raise_alike(run: "Run", error: UsageError | RunError | None) -> None:
    """Raise the error of one rank on all ranks. A failure to read comes first, then a damaged checkpoint."""
    errors = run.gathered(None if error is None else (_kind(error), str(error)))
    for kind in (RunError, OtherVersion, UsageError):
        for rank, of_rank in enumerate(errors):
            if of_rank is not None and of_rank[0] == kind.__name__:
                raise kind(f"rank {rank}: {of_rank[1]}" if kind is RunError else of_rank[1])


def _kind(error: UsageError | RunError) -> str:
    return next(kind.__name__ for kind in (RunError, OtherVersion, UsageError) if isinstance(error, kind))


def same_everywhere(run: "Run", path: Path, manifest: "Manifest | None") -> None:
    """Raise RunError on all ranks if a rank read a different manifest than rank 0."""
    from mplug.checkpoint.manifest import checksum  # imports pydantic

    checksums = run.gathered(None if manifest is None else checksum(manifest))
    for rank, of_rank in enumerate(checksums):
        if of_rank != checksums[0]:
            different = f"rank {rank} reads a different checkpoint at '{path}' than rank 0"
            raise RunError(f"{different}; put the folder on a file system that all ranks share")


def manifest_of(run: "Run", path: Path) -> "Manifest":
    """The manifest of a checkpoint, which all ranks read together. An error of one rank is raised on all ranks."""
    manifest, error = None, None
    try:
        manifest = read_manifest(path)
    except (UsageError, RunError) as raised:
        error = raised
    raise_alike(run, error)
    same_everywhere(run, path, manifest)
    assert manifest is not None
    return manifest


def _check(run: "Run", path: Path, verified: Verified) -> "tuple[Manifest | None, UsageError | RunError | None]":
    """Read and verify this rank's share: the manifest, or the error if the checkpoint is damaged or unreadable."""
    try:
        manifest = read_valid(path, lambda names: verified.unverified(path, share_of(run, names)))
    except (UsageError, RunError) as error:
        return None, error
    verified.note(path, share_of(run, manifest["files"]))
    return manifest, None


def _not_newer(path: Path) -> list[Path]:
    """A checkpoint and the earlier ones in its folder, newest first."""
    if not is_named_as_checkpoint(path):
        return [path]
    older = [other for other in complete(path.parent) if step_of(other) < step_of(path)]
    return [path, *reversed(older)]


def _none_is_valid(folder: Path, reasons: list[str]) -> UsageError:
    lines = "\n".join(f"  {reason}" for reason in reasons)
    return UsageError(f"no checkpoint in '{folder}' is valid:\n{lines}\nrestore one of them, or start a new run")
