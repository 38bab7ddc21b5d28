"""Atomic writing of small files."""

import os
from pathlib import Path


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a small file under a temporary name, then rename it to `path`. Text is encoded as UTF-8.

    After any failure, `path` has either its old or its new content.
    """
    temporary = path.with_name(f".{path.name}.partial")
    with temporary.open("wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
