"""Finds the files of a corpus, and splits them into training and validation."""

import glob
import hashlib
import os
import sysconfig
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mplug import UsageError, local_path

SEPARATOR = b"\0"
"""Ends each document; a byte that does not occur in text."""
FEW_FILES = 20
"""With fewer files than this, validation gets the end of every file instead of whole files."""


def find_files(path: str | None, pattern: str) -> tuple[Path, list[Path]]:
    """(root, sorted files) of a file, a folder or a glob; None means the standard library.

    Raises UsageError if there is no file.
    """
    if path is None:
        return _standard_library()
    source = local_path(path)
    if source.is_dir():
        root, files = source, _matching(source, pattern)
        reason = f"contains no file that matches data.pattern '{pattern}'"
    elif source.is_file():
        root, files, reason = source.parent, [source], ""
    else:
        files = [file for file in map(Path, glob.glob(str(source), recursive=True)) if file.is_file()]
        root, reason = _common_folder(files), "does not exist, and matches no file as a glob"
    if not files:
        near = sorted(one for one in source.parent.glob(f"{glob.escape(source.name)}.*") if one.is_file())
        meant = f" (did you mean '{near[0]}'?)" if near else ""
        raise UsageError(f"data.path '{path}' {reason}{meant}; set data.path to a text file, a folder or a glob")
    return root, sorted(files)


def refuse_corpus(path: str) -> None:
    """Raise UsageError if a path is a file, or the common prefix, of a corpus of tokens: PREFIX.bin and PREFIX.idx."""
    named = Path(path).expanduser()
    prefix = named.with_suffix("") if named.suffix in (".bin", ".idx") else named
    if not named.is_dir() and all(prefix.with_name(f"{prefix.name}{suffix}").is_file() for suffix in (".bin", ".idx")):
        raise UsageError(
            f"data.path '{path}' is of a corpus of tokens, {prefix.name}.bin with {prefix.name}.idx, which data/text "
            f"does not read; train on it with --data indexed --set data.path={prefix}"
        )


def _matching(folder: Path, pattern: str) -> list[Path]:
    try:
        return [file for file in folder.glob(pattern) if file.is_file()]
    except (ValueError, NotImplementedError) as error:
        raise UsageError(f"data.pattern '{pattern}' is not a valid glob: {error}; use one such as '**/*.txt'") from None


def _common_folder(files: list[Path]) -> Path:
    folders = [set(file.parents) for file in files]
    shared = set.intersection(*folders) if folders else {Path()}
    return max(shared, key=lambda folder: len(folder.parts), default=Path())


def _standard_library() -> tuple[Path, list[Path]]:
    """The running interpreter's standard library, without tests, generated tables and installed packages."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"test", "tests", "idle_test", "encodings", "pydoc_data", "site-packages", "dist-packages", "__pycache__"}
    files = [
        file
        for file in root.glob("**/*.py")
        if skipped.isdisjoint(file.relative_to(root).parts) and not file.name.startswith("_sysconfigdata")
    ]
    if not files:
        raise UsageError(f"Python's standard library has no .py file in '{root}'; set data.path to your own text")
    return root, sorted(files)


def read_split(root: Path, files: list[Path], split: str, validation_percent: int) -> NDArray[np.uint8]:
    """The bytes of one split; SEPARATOR ends each document.

    A hash of a file's path below `root` decides whether it is for validation. If there are fewer than FEW_FILES files,
    or if the hash leaves a side empty, validation gets the last part of every file instead.
    """
    held_out = _held_out(root, files, validation_percent)
    if held_out is not None:
        texts = [_read(file) for file in files if (file in held_out) == (split == "validation")]
    else:
        texts = [_part(_read(file), split, validation_percent) for file in files]
    return np.frombuffer(b"".join(text + SEPARATOR for text in texts if text), dtype=np.uint8)


def measure_split(root: Path, files: list[Path], split: str, validation_percent: int) -> int:
    """The number of bytes that `read_split` returns, from the sizes of the files: no file is read.

    Raises UsageError for a file that this user may not read.
    """
    held_out, sizes = _held_out(root, files, validation_percent), {file: _size(file) for file in files}
    if held_out is not None:
        parts = [sizes[file] for file in files if (file in held_out) == (split == "validation")]
    else:
        parts = [len(range(size)[_bounds(size, split, validation_percent)]) for size in sizes.values()]
    return sum(part + len(SEPARATOR) for part in parts if part)


def enough_for_windows(length: int, seq_length: int) -> bool:
    """Whether a stream of `length` tokens has a whole window of S + 1 tokens at every offset below S."""
    return length >= 2 * seq_length + 1


def _held_out(root: Path, files: list[Path], validation_percent: int) -> set[Path] | None:
    """The files that are for validation as a whole; None if validation gets a part of every file."""
    found = {file for file in files if _hash_percent(file.relative_to(root)) < validation_percent}
    return found if len(files) >= FEW_FILES and 0 < len(found) < len(files) else None


def fingerprint_of(stream: NDArray[np.uint8] | NDArray[np.int32]) -> str:
    """A hash of a split's tokens, independent of the location of the files."""
    return hashlib.blake2b(stream.data, digest_size=16).hexdigest()


def _hash_percent(path: Path) -> int:
    return int.from_bytes(hashlib.sha256(path.as_posix().encode()).digest()[:8], "big") % 100


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise UsageError(_unreadable(file, str(error.strerror))) from None


def _size(file: Path) -> int:
    try:
        size = file.stat().st_size
    except OSError as error:
        raise UsageError(_unreadable(file, str(error.strerror))) from None
    if not os.access(file, os.R_OK):
        raise UsageError(_unreadable(file, "permission denied"))
    return size


def _unreadable(file: Path, reason: str) -> str:
    return f"cannot read '{file}': {reason}; make it readable, or remove it from data.path"


def _part(text: bytes, split: str, validation_percent: int) -> bytes:
    return text[_bounds(len(text), split, validation_percent)]


def _bounds(size: int, split: str, validation_percent: int) -> slice:
    """The part of a file of `size` bytes that a split gets."""
    cut = size * (100 - validation_percent) // 100
    return slice(cut, None) if split == "validation" else slice(cut)
