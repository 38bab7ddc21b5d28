"""Files that are written whole or not at all."""

import os
from pathlib import Path


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a small file aside and rename it: after any failure, `path` has its old or new content. Text is UTF-8."""
    aside = path.with_name(f".{path.name}.partial")
    with aside.open("wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)
