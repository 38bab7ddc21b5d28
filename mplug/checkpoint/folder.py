"""The folder of checkpoints on the disk: which are complete, and whether they are valid. Imports no torch."""

import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from mplug.checkpoint.names import MANIFEST, path_of, step_of
from mplug.checkpoint.reading import Expected, Replaced, check_file, check_header, read_small, status_of
from mplug.errors import RunError, UsageError, listed, printable

if TYPE_CHECKING:
    from mplug.checkpoint.manifest import Contents, Manifest

LONGEST_REASON = 500
REMEDY = "; remove it to use the one before it"


class OtherVersion(UsageError):
    """A checkpoint of another format, which another version of mplug has saved and can read.

    It is not damaged: no run skips it to continue from one before it, and no save removes it.
    """


def is_named_as_checkpoint(path: Path) -> bool:
    """Whether a folder's name is that of a checkpoint of some step."""
    return re.fullmatch(r"step_[0-9]{8,18}", path.name) is not None


def complete(folder: Path) -> list[Path]:
    """The complete checkpoints of a folder, the oldest first."""
    return sorted(filter(is_named_as_checkpoint, folder.glob("step_*")), key=step_of)


def newest(folder: Path) -> Path:
    """The newest complete checkpoint; UsageError where there is none."""
    found = complete(folder)
    if not found:
        raise UsageError(f"there is no complete checkpoint in '{folder}'; choose another run with --name")
    return found[-1]


def at_step(folder: Path, step: int | None) -> Path:
    """The complete checkpoint of a step, or the newest; UsageError where there is none."""
    if step is None:
        return newest(folder)
    path = path_of(folder, step)
    if not path.is_dir():
        known = listed(str(step_of(found)) for found in complete(folder))
        raise UsageError(f"there is no checkpoint of step {step} in '{folder}' (steps there: {known})")
    return path


def read_manifest(path: Path) -> "Manifest":
    """The plain data of a checkpoint, whose files have the sizes that it states.

    Raises UsageError where the checkpoint is damaged, and RunError where the file system fails. A save may replace the
    checkpoint meanwhile: the new manifest is read then.
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
    """The plain data of a checkpoint, whose files all match their checksums: reads all of it. Raises as above.

    `each` iterates over the names of the files, as a progress bar does.
    """
    manifest = read_manifest(path)
    while True:
        try:
            verify(path, manifest, each(list(manifest["files"])))
            return manifest
        except (UsageError, RunError):  # a file may vanish between two looks at it
            newer = read_manifest(path)
            if newer == manifest:
                raise
            manifest = newer


def verify(path: Path, manifest: "Contents", names: Iterable[str]) -> None:
    """Read files whole and compare their checksums and headers; UsageError names the first that is not right."""
    from mplug.checkpoint.manifest import expected_in  # imports pydantic

    expected: Mapping[str, Expected] = {}
    for name in names:
        expected = expected or expected_in(manifest)  # takes as long as the manifest has chunks
        with _explained(path):
            check_file(path, name, manifest["files"][name]["crc32"], expected[name])


def read_described(path: Path) -> "Manifest":
    """The plain data of a checkpoint, whose files have the headers that it states; reads no tensor. Raises as above."""
    from mplug.checkpoint.manifest import expected_in  # imports pydantic

    manifest = read_manifest(path)
    for name, tensors in expected_in(manifest).items():
        with _explained(path):
            check_header(path, name, tensors)
    return manifest


def damaged(path: Path, reason: str) -> UsageError:
    """What to report about a checkpoint that is not what was saved, or that mplug cannot have saved."""
    return UsageError(f"checkpoint '{path}' is damaged: {printable(reason, LONGEST_REASON)}{REMEDY}")


def _text_of(path: Path) -> bytes:
    if not os.path.lexists(path):
        raise UsageError(f"there is no checkpoint '{path}'; it was removed meanwhile, or never saved")
    with _explained(path):
        if path.is_symlink():
            raise ValueError("it is a link")
        while True:
            with suppress(Replaced):  # a save has replaced the manifest by the next one
                return read_small(path, MANIFEST)


def _parsed(path: Path, text: bytes) -> "Manifest":
    from mplug.checkpoint.manifest import OtherFormat, decode  # imports pydantic

    with _explained(path):
        try:
            manifest = decode(text)
        except OtherFormat as error:
            remedy = "use the mplug that has saved it, or move it away"
            raise OtherVersion(f"checkpoint '{path}' {error}; {remedy}") from None
        if is_named_as_checkpoint(path) and manifest["step"] != step_of(path):
            raise ValueError(f"its folder is named after step {step_of(path)}, and it is of step {manifest['step']}")
        for name, expected in manifest["files"].items():
            if status_of(path, name).st_size != expected["bytes"]:
                raise ValueError(f"'{name}' is not what was saved")
    return manifest


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Raise the errors of reading a checkpoint as the errors of a run."""
    try:
        yield
    except ValueError as error:
        raise damaged(path, str(error)) from error
    except OSError as error:
        raise RunError(f"cannot read checkpoint '{path}': {error}") from error
