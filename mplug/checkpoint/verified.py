"""Files of checkpoints that need not be read again: they matched their checksums, and the disk has them unchanged."""

import os
from collections.abc import Iterable
from pathlib import Path

Signature = tuple[int, int, int, int]


class Verified:
    """Files that this process has written, or has compared with their checksums alone or with the other ranks."""

    def __init__(self) -> None:
        self._known: dict[Path, Signature] = {}

    def note(self, path: Path, names: Iterable[str]) -> None:
        """Files of a checkpoint have matched their checksums just now."""
        self._known |= {path / name: signature for name in names if (signature := signature_of(path / name))}

    def forget(self, path: Path) -> None:
        """A checkpoint is removed or replaced."""
        self._known = {file: signature for file, signature in self._known.items() if file.parent != path}

    def unknown(self, path: Path, names: Iterable[str]) -> list[str]:
        """The files of a checkpoint that must be read to know whether they match their checksums."""
        return [name for name in names if self._known.get(path / name, ()) != signature_of(path / name)]


def signature_of(file: Path) -> Signature | None:
    """What changes when a file does: device, inode, size and time of modification. None where there is no file."""
    try:
        status = os.lstat(file)
    except OSError:
        return None
    return (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
