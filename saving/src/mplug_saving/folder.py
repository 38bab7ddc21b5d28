"""List the checkpoints in a folder, read their manifests, and verify their files. Imports no torch."""

import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from mplug.errors import RunError, UsageError, listed, printable
from mplug.run.folder import all_directories, find_directory
from mplug_saving.names import MANIFEST, path_of, step_of
from mplug_saving.reading import Expected, Replaced, check_file, check_header, read_small, status_of

if TYPE_CHECKING:
    from mplug_saving.manifest import Contents, Manifest

LONGEST_REASON = 500
"""Maximum number of characters of the reason in the message about a damaged checkpoint."""
REMEDY = "; remove it to use the previous checkpoint"


class OtherVersion(UsageError):
    """A checkpoint in another format, which another version of mplug saved and can read.

    It is not damaged. A run does not skip it to continue from an earlier checkpoint, and a save does not remove it.
    """


def is_named_as_checkpoint(path: Path) -> bool:
    """Whether a path has the name of a checkpoint: 'step_00000100'."""
    return re.fullmatch(r"step_[0-9]{8,18}", path.name) is not None


def complete(folder: Path) -> list[Path]:
    """The complete checkpoints in a folder, oldest first."""
    return sorted(filter(is_named_as_checkpoint, folder.glob("step_*")), key=step_of)


def newest_saved() -> Path:
    """The folder of the newest run with a complete checkpoint. UsageError if no run has one."""
    runs = all_directories()
    found = next((path for path in runs if complete(path / "checkpoints")), None)
    if found is None:
        newest(find_directory(None) / "checkpoints")  # raises
    assert found is not None
    return found


def newest(folder: Path) -> Path:
    """The newest complete checkpoint in a folder. UsageError if there is none."""
    paths = complete(folder)
    if not paths:
        raise UsageError(f"there is no complete checkpoint in '{folder}'; use another run with --name")
    return paths[-1]


def at_step(folder: Path, step: int | None) -> Path:
    """The complete checkpoint of a step, or the newest one if `step` is None. UsageError if there is none."""
    if step is None:
        return newest(folder)
    path = path_of(folder, step)
    if not path.is_dir():
        steps = listed(str(step_of(other)) for other in complete(folder))
        raise UsageError(f"there is no checkpoint of step {step} in '{folder}' (available steps: {steps})")
    return path


def read_manifest(path: Path) -> "Manifest":
    """The manifest of a checkpoint whose files have the sizes that the manifest states.

    Raises UsageError if the checkpoint is damaged, and RunError if the file system fails. If a save replaces the
    checkpoint at the same time, the function reads the new manifest.
    """
    return read_with_checksum(path)[0]


def read_with_checksum(path: Path) -> "tuple[Manifest, int]":
    """The plain data of a checkpoint, and the CRC-32 of the manifest's text. Raises as above."""
    text = _text_of(path)
    while True:
        try:
            return _parsed(path, text), zlib.crc32(text)
        except UsageError:
            newer = _text_of(path)
            if newer == text:
                raise
            text = newer


def checksum_of_manifest(path: Path) -> int:
    """The CRC-32 of a manifest's text, which is not parsed. Raises as above."""
    return zlib.crc32(_text_of(path))


def read_valid(path: Path, each: Callable[[list[str]], Iterable[str]] = list) -> "Manifest":
    """The manifest of a checkpoint whose files all match their checksums. Reads all files.

    `each` wraps the list of file names; a progress bar does this. Raises the errors of `read_manifest`.
    """
    manifest = read_manifest(path)
    while True:
        try:
            verify(path, manifest, each(list(manifest["files"])))
            return manifest
        except (UsageError, RunError):  # a save may have replaced the checkpoint
            newer = read_manifest(path)
            if newer == manifest:
                raise
            manifest = newer


def verify(path: Path, manifest: "Contents", names: Iterable[str]) -> None:
    """Read files completely and compare their checksums and headers. UsageError names the first file that differs."""
    from mplug_saving.manifest import expected_in  # imports pydantic

    expected: Mapping[str, Expected] = {}
    for name in names:
        expected = expected or expected_in(manifest)  # takes as long as the manifest has chunks
        with _explained(path):
            check_file(path, name, manifest["files"][name]["crc32"], expected[name])


def read_described(path: Path) -> "Manifest":
    """The manifest of a checkpoint whose files have the headers that it states. Reads no tensor.

    Raises the errors of `read_manifest`.
    """
    from mplug_saving.manifest import expected_in  # imports pydantic

    manifest = read_manifest(path)
    for name, tensors in expected_in(manifest).items():
        with _explained(path):
            check_header(path, name, tensors)
    return manifest


def damaged(path: Path, reason: str) -> UsageError:
    """The error about a checkpoint that has changed since it was saved, or that mplug cannot have saved."""
    return UsageError(f"checkpoint '{path}' is damaged: {printable(reason, LONGEST_REASON)}{REMEDY}")


def _text_of(path: Path) -> bytes:
    if not os.path.lexists(path):
        raise UsageError(f"there is no checkpoint '{path}'; it was never saved, or it was removed")
    with _explained(path):
        if path.is_symlink():
            raise ValueError("it is a link")
        while True:
            with suppress(Replaced):  # a save has replaced the manifest by the next one
                return read_small(path, MANIFEST)


def _parsed(path: Path, text: bytes) -> "Manifest":
    from mplug_saving.manifest import OtherFormat, decode  # imports pydantic

    with _explained(path):
        try:
            manifest = decode(text)
        except OtherFormat as error:
            remedy = "use the version of mplug that saved it, or move it to another folder"
            raise OtherVersion(f"checkpoint '{path}' {error}; {remedy}") from None
        if is_named_as_checkpoint(path) and manifest["step"] != step_of(path):
            raise ValueError(
                f"its folder has the name of step {step_of(path)}, but its manifest states step {manifest['step']}"
            )
        for name, expected in manifest["files"].items():
            if status_of(path, name).st_size != expected["bytes"]:
                raise ValueError(f"'{name}' has changed since it was saved")
    return manifest


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Convert the errors of reading a checkpoint to a UsageError (damaged) or a RunError (unreadable)."""
    try:
        yield
    except ValueError as error:
        raise damaged(path, str(error)) from error
    except OSError as error:
        raise RunError(f"cannot read checkpoint '{path}': {error}") from error
