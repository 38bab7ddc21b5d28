"""Remember verified files of checkpoints: a file is read again only after it has changed on the disk."""

import os
from collections.abc import Iterable
from pathlib import Path

Signature = tuple[int, int, int, int]


class Verified:
    """The files that this process has written, or that it or other ranks have compared with their checksums."""

    def __init__(self) -> None:
        self._signatures: dict[Path, Signature] = {}

    def note(self, path: Path, names: Iterable[str]) -> None:
        """Add files of a checkpoint, which have just matched their checksums."""
        self._signatures |= {path / name: signature for name in names if (signature := signature_of(path / name))}

    def forget(self, path: Path) -> None:
        """Remove the files of a checkpoint, which is removed or replaced."""
        self._signatures = {file: signature for file, signature in self._signatures.items() if file.parent != path}

    def unverified(self, path: Path, names: Iterable[str]) -> list[str]:
        """The files of a checkpoint that must be read, because it is unknown whether they match their checksums."""
        return [name for name in names if self._signatures.get(path / name, ()) != signature_of(path / name)]


def signature_of(file: Path) -> Signature | None:
    """Device, inode, size and modification time, which change with the file. None if there is no file."""
    try:
        status = os.lstat(file)
    except OSError:
        return None
    return (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
