"""Files that are written whole or not at all, and that are on the disk when a function returns."""

import os
from contextlib import suppress
from pathlib import Path
from typing import IO, Any


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a small file aside and rename it: after any failure, `path` has its old or new content. Text is UTF-8.

    Only one process may write a path at a time. Raises OSError.
    """
    aside = path.with_name(f".{path.name}.partial")
    try:
        with aside.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            sync_file(file)
        aside.replace(path)
    except OSError:
        with suppress(OSError):  # if not even its name could be written
            aside.unlink(missing_ok=True)
        raise


def sync_file(file: IO[Any]) -> None:
    """Put what has been written to an open file on the disk. Raises OSError."""
    file.flush()
    os.fsync(file.fileno())


def sync_path(path: Path) -> None:
    """Put a closed file on the disk, or the names in a folder: files that were created, renamed or removed."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
