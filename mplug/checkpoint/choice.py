"""The newest valid checkpoint, from which a run continues; those that it skips, and why."""

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
    """A checkpoint, and why each newer one was skipped."""

    path: Path
    manifest: "Manifest"
    skipped: tuple[str, ...] = ()

    def lines(self, use: str = "continuing from") -> list[str]:
        """What to report: nothing where no checkpoint was skipped. `use` is what is done with the chosen step."""
        if not self.skipped:
            return []
        return [*(f"skipped: {reason}" for reason in self.skipped), f"{use} step {step_of(self.path)}"]


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


def choose(run: "Run", path: Path, verified: Verified) -> Choice:
    """The newest valid checkpoint of a folder that is not newer than `path`; all ranks choose the same.

    Of the files of a checkpoint, each rank reads its share. What they find goes to `verified`. Raises UsageError where
    none is valid or another version of mplug has saved one, and RunError where ranks do not see the same.
    """
    skipped: list[str] = []
    for candidate in run.gathered(_not_newer(path))[0]:
        manifest, error = _looked_at(run, candidate, verified)
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
    """The files of a checkpoint that this rank reads when all ranks verify it together."""
    return sorted(files)[run.rank :: run.mesh.world_size]


def raise_alike(run: "Run", error: UsageError | RunError | None) -> None:
    """Raise on all ranks what one of them has found: first that a rank cannot read, then that a checkpoint is wrong."""
    found = run.gathered(None if error is None else (_kind(error), str(error)))
    for kind in (RunError, OtherVersion, UsageError):
        for rank, fault in enumerate(found):
            if fault is not None and fault[0] == kind.__name__:
                raise kind(f"rank {rank}: {fault[1]}" if kind is RunError else fault[1])


def _kind(error: UsageError | RunError) -> str:
    return next(kind.__name__ for kind in (RunError, OtherVersion, UsageError) if isinstance(error, kind))


def same_everywhere(run: "Run", path: Path, manifest: "Manifest | None") -> None:
    """Raise RunError on all ranks where one has read another manifest."""
    from mplug.checkpoint.manifest import checksum  # imports pydantic

    found = run.gathered(None if manifest is None else checksum(manifest))
    for rank, other in enumerate(found):
        if other != found[0]:
            raise RunError(f"rank {rank} reads another checkpoint at '{path}' than rank 0; is the folder shared?")


def manifest_of(run: "Run", path: Path) -> "Manifest":
    """The plain data of a checkpoint, read by all ranks together; what one cannot read is raised on all."""
    manifest, error = None, None
    try:
        manifest = read_manifest(path)
    except (UsageError, RunError) as raised:
        error = raised
    raise_alike(run, error)
    same_everywhere(run, path, manifest)
    assert manifest is not None
    return manifest


def _looked_at(run: "Run", path: Path, verified: Verified) -> "tuple[Manifest | None, UsageError | RunError | None]":
    """What this rank finds: the manifest, or why the checkpoint is not valid or cannot be read."""
    try:
        manifest = read_valid(path, lambda names: verified.unknown(path, share_of(run, names)))
    except (UsageError, RunError) as error:
        return None, error
    verified.note(path, share_of(run, manifest["files"]))
    return manifest, None


def _not_newer(path: Path) -> list[Path]:
    """A checkpoint, and those before it in its folder, the newest first."""
    if not is_named_as_checkpoint(path):
        return [path]
    older = [other for other in complete(path.parent) if step_of(other) < step_of(path)]
    return [path, *reversed(older)]


def _none_is_valid(folder: Path, reasons: list[str]) -> UsageError:
    found = "\n".join(f"  {reason}" for reason in reasons)
    return UsageError(f"no checkpoint in '{folder}' is valid:\n{found}\nrestore one of them, or begin a new run")
