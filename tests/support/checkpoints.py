"""Checkpoints in tests: which of a folder are valid, damage to a file, and a pickle that runs code."""

from pathlib import Path
from typing import Any

from mplug.checkpoint.folder import complete, read_valid
from mplug.errors import UsageError


def valid_in(folder: Path) -> list[Path]:
    """The checkpoints of a folder that can be loaded, the oldest first."""
    found = []
    for path in complete(folder):
        try:
            read_valid(path)
        except UsageError:
            continue
        found.append(path)
    return found


def flip_bit(file: Path, byte: int = -1, bit: int = 0) -> None:
    """Flip a bit of a file, whose size stays."""
    data = bytearray(file.read_bytes())
    data[byte] ^= 1 << bit
    file.write_bytes(data)


class Evil:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)
