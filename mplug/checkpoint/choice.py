"""The newest valid checkpoint, from which a run continues; those that it skips, and why."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mplug.checkpoint import REMEDY, complete, is_named_as_checkpoint, newest, read_manifest, step_of, verify
from mplug.checkpoint.verified import Verified
from mplug.errors import RunError, UsageError

if TYPE_CHECKING:
    from mplug.checkpoint.manifest import Manifest
    from mplug.run import Run


@dataclass(frozen=True)
class Choice:
    """A checkpoint, and why each newer one was skipped."""

    path: Path
    manifest: "Manifest"
    skipped: tuple[str, ...] = ()

    def lines(self) -> list[str]:
        """What to report: nothing where no checkpoint was skipped."""
        if not self.skipped:
            return []
        return [*(f"skipped: {reason}" for reason in self.skipped), f"continuing from step {step_of(self.path)}"]


def newest_readable(folder: Path) -> Choice:
    """The newest checkpoint whose manifest is valid and whose files have the right sizes; reads no tensor.

    UsageError where there is none.
    """
    skipped: list[str] = []
    for path in reversed(complete(folder)):
        try:
            return Choice(path, read_manifest(path), tuple(skipped))
        except UsageError as error:
            skipped.append(str(error).removesuffix(REMEDY))
    if not skipped:
        newest(folder)  # raises
    raise _none_is_valid(folder, skipped)


def choose(run: "Run", path: Path, verified: Verified) -> Choice:
    """The newest valid checkpoint of a folder that is not newer than `path`; all ranks choose the same.

    Of the files of a checkpoint, each rank reads its share. What they find goes to `verified`. Raises UsageError where
    none is valid, and RunError where ranks do not see the same.
    """
    skipped: list[str] = []
    for candidate in run.gathered(_not_newer(path))[0]:
        manifest, fault, failure = _looked_at(run, candidate, verified)
        found = run.gathered((fault, failure, _checksum(manifest)))
        for rank, (_, failure, _) in enumerate(found):
            if failure:
                raise RunError(f"rank {rank}: {failure}")
        if faults := [fault for fault, _, _ in found if fault]:
            skipped.append(faults[0].removesuffix(REMEDY))
            continue
        for rank, (_, _, checksum) in enumerate(found):
            if checksum != found[0][2]:
                raise RunError(
                    f"rank {rank} reads another checkpoint at '{candidate}' than rank 0; is the folder shared?"
                )
        assert manifest is not None
        if run.rank == 0:
            verified.note(candidate, manifest["files"])  # the other ranks have read their shares
        return Choice(candidate, manifest, tuple(skipped))
    raise _none_is_valid(path.parent, skipped)


def share_of(run: "Run", manifest: "Manifest") -> list[str]:
    """The files of a checkpoint that this rank reads when all ranks verify it together."""
    return sorted(manifest["files"])[run.rank :: run.mesh.world_size]


def _looked_at(run: "Run", path: Path, verified: Verified) -> "tuple[Manifest | None, str, str]":
    """What this rank finds: the manifest, why the checkpoint is not valid, and why that could not be found out."""
    try:
        manifest = read_manifest(path)
        share = share_of(run, manifest)
        verify(path, manifest, verified.unknown(path, share))
    except UsageError as error:
        return None, str(error), ""
    except RunError as error:
        return None, "", str(error)
    verified.note(path, share)
    return manifest, "", ""


def _not_newer(path: Path) -> list[Path]:
    """A checkpoint, and those before it in its folder, the newest first."""
    if not is_named_as_checkpoint(path):
        return [path]
    older = [other for other in complete(path.parent) if step_of(other) < step_of(path)]
    return [path, *reversed(older)]


def _checksum(manifest: "Manifest | None") -> int | None:
    from mplug.checkpoint.manifest import checksum  # imports pydantic

    return None if manifest is None else checksum(manifest)


def _none_is_valid(folder: Path, reasons: list[str]) -> UsageError:
    found = "\n".join(f"  {reason}" for reason in reasons)
    return UsageError(f"no checkpoint in '{folder}' is valid:\n{found}\nrestore one of them, or begin a new run")
