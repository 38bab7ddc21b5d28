"""An on-disk cache of arrays that are slow to compute, keyed by a description of their inputs.

An entry is a folder, named by a hash of its description. It has one `.npy` file per array, and `entry.json` with the
description and each file's checksum. It gets its final name when it is complete. If several processes need an entry on
one file system, the first one to take the lock makes it. If files cannot be locked, each makes it and the first stays.
"""

import errno
import fcntl
import json
import os
import shutil
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mplug import UsageError, sync_file
from mplug_indexed.failures import cannot_write

Arrays = dict[str, NDArray[Any]]
BLOCK = 1 << 24
"""Bytes per read of a checksum."""


def digest(array: NDArray[Any]) -> str:
    """A hash of an array's bytes, without copying the whole array."""
    found = blake2b(digest_size=16)
    data = array.view(np.uint8).reshape(-1)
    for start in range(0, len(data), BLOCK):
        found.update(data[start : start + BLOCK].tobytes())
    return found.hexdigest()


def choose_folder(configured: str | None, beside: Path) -> Path:
    """The folder of entries: that of the config, else one beside the data, else one in the user's cache folder."""
    if configured is not None:
        folder = Path(configured).expanduser()
        if reason := _unusable(folder):
            raise UsageError(f"data.cache '{folder}' cannot be written: {reason}; set it to a writable folder")
        return folder
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mplug" / "indexed"
    tried = [beside.parent / "index-cache", home]
    reasons = [f"'{folder}' ({reason})" for folder in tried if (reason := _unusable(folder))]
    if len(reasons) == len(tried):
        raise UsageError(
            f"the cache of indices cannot be written to {' or '.join(reasons)}; set data.cache to a writable folder"
        )
    return next(folder for folder in tried if not _unusable(folder))


def _unusable(folder: Path) -> str:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return str(error.strerror)
    return "" if os.access(folder, os.W_OK | os.X_OK) else "permission denied"


class Cache:
    """The cache in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def get(self, description: Mapping[str, Any], make: Callable[[], Mapping[str, NDArray[Any]]]) -> Arrays:
        """The arrays of a description, memory-mapped; calls `make` if the entry is missing or damaged."""
        text = json.dumps(description, sort_keys=True)
        path = self.folder / blake2b(text.encode(), digest_size=16).hexdigest()
        found = _load(path, text)
        if found is None:
            with self._locked():
                found = _load(path, text)  # another process may have made it in the meantime
                if found is None:
                    self._store(path, text, make())
                    found = _load(path, text)
        if found is None:
            raise UsageError(
                f"'{path}' is damaged as soon as it is written; set data.cache to a folder on another disk"
            )
        return found

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the folder's lock, if the file system has locks; a process that dies releases it."""
        with (self.folder / ".lock").open("ab") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX)
            except OSError:  # a file system without locks
                yield
                return
            yield

    def _store(self, path: Path, description: str, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Write an entry under a temporary name, then rename it; a damaged entry of that name is removed."""
        mark = f"{os.getpid():x}-{os.urandom(4).hex()}.tmp"
        unfinished, damaged = path.with_name(f"{path.name}.{mark}"), path.with_name(f"{path.name}.damaged.{mark}")
        try:
            unfinished.mkdir()
            for name, array in arrays.items():
                with (unfinished / f"{name}.npy").open("xb") as file:
                    np.save(file, array)
                    sync_file(file)
            checksums = {name: _checksum(unfinished / f"{name}.npy") for name in arrays}
            with (unfinished / "entry.json").open("x") as file:
                json.dump({"description": json.loads(description), "checksums": checksums}, file)
                sync_file(file)
            if path.exists():
                path.rename(damaged)
            unfinished.rename(path)
        except OSError as error:
            if not path.exists():  # else another process was faster, without locks
                if error.errno is None:  # numpy reports a short write without errno
                    error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                raise cannot_write(self.folder, error, "set data.cache to a folder on another disk") from None
        finally:
            for rest in (unfinished, damaged):
                shutil.rmtree(rest, ignore_errors=True)


def _checksum(path: Path) -> int:
    found = 0
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            found = zlib.crc32(block, found)
    return found


def _load(path: Path, description: str) -> Arrays | None:
    """The arrays of an entry, or None if it is missing or damaged."""
    try:
        entry = json.loads((path / "entry.json").read_text())
        checksums = entry["checksums"]
        if entry["description"] != json.loads(description) or not checksums:
            return None
        if any(_checksum(path / f"{name}.npy") != expected for name, expected in checksums.items()):
            return None
        return {name: _map(path / f"{name}.npy") for name in checksums}
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        RecursionError,
    ):  # a damaged entry.json may contain anything
        return None


def _map(path: Path) -> NDArray[Any]:
    array = np.load(path, mmap_mode="r") if path.stat().st_size > 4096 else np.load(path)
    return array.view(np.ndarray)  # type: ignore[no-any-return]
