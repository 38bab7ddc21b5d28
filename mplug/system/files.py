"""Files that are written whole or not at all, and that are on the disk when a function returns."""

import os
from contextlib import suppress
from pathlib import Path
from typing import IO, Any


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a small file under a temporary name, then rename it to `path`. Text is encoded as UTF-8.

    After any failure, `path` has either its old or its new content. Only one process may write a path at a time. Raises
    OSError.
    """
    temporary = path.with_name(f".{path.name}.partial")
    try:
        with temporary.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            sync_file(file)
        temporary.replace(path)
    except OSError:
        with suppress(OSError):  # not even its name could be written
            temporary.unlink(missing_ok=True)
        raise


def sync_file(file: IO[Any]) -> None:
    """Flush what has been written to an open file to the disk. Raises OSError."""
    file.flush()
    os.fsync(file.fileno())


def sync_path(path: Path) -> None:
    """Flush a closed file, or the entries of a folder, to the disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
