"""Copy one checkpoint of a run to a store. Each rank copies its share of the files; rank 0 makes the copy visible."""

import logging
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import IO

from mplug import RunError
from mplug_store.address import Store, StoreError
from mplug_store.checkpoints import MANIFEST, Manifest, parse, small_files

log = logging.getLogger("mplug")
PAUSES = (1.0, 5.0)
"""Seconds before the second and third attempt to write a file; the libraries of stores also repeat requests."""
POLL = 1.0
"""Seconds between two looks for the files of other ranks."""


Share = Callable[[list[str]], list[str]]
"""Of the sorted names of a checkpoint's files, those that a rank copies."""


def all_files(rank: int, world_size: int) -> Share:
    """The ranks divide all files: they share a folder."""
    return lambda names: names[rank::world_size]


def own_files(rank: int) -> Share:
    """A rank copies what it has written: other ranks do not see it."""
    return lambda names: [name for name in names if name.startswith(f"rank{rank:05d}.")]


class Copy:
    """A checkpoint that this rank copies. Its files are open, so that a removal of the checkpoint does not matter."""

    def __init__(self, path: Path, share_of: "Share") -> None:
        self.path = path
        self.manifest = parse((path / MANIFEST).read_bytes(), str(path))
        self._stack = ExitStack()
        share = share_of(sorted(self.manifest.files))
        try:
            self._share: dict[str, IO[bytes]] = {
                name: self._stack.enter_context((path / name).open("rb")) for name in share
            }
        except OSError:
            self._stack.close()
            raise

    def upload(self, store: Store) -> None:
        """Copy this rank's files. A file that an earlier attempt has copied completely is not copied again."""
        with self._stack:
            folder = self.manifest.folder
            present = store.sizes(folder)
            for name, file in self._share.items():
                size, checksum = self.manifest.files[name]
                if present.get(f"{folder}/{name}") == size:
                    continue
                if _repeated(lambda name=name, file=file: store.write(f"{folder}/{name}", file)) != checksum:
                    store.remove([f"{folder}/{name}"])
                    raise RunError(f"'{self.path / name}' is damaged, so the checkpoint is not copied")

    def close(self) -> None:
        """Close the files of a copy that is not made."""
        self._stack.close()


def _repeated(write: Callable[[], int]) -> int:
    """Repeat a write that failed. A refusal is final: of the user, or because there is no bucket."""
    for pause in PAUSES:
        try:
            return write()
        except StoreError as error:
            if isinstance(error.__cause__, PermissionError | FileNotFoundError):
                raise
            log.warning("%s; the copy is tried again", error)
            time.sleep(pause)
    return write()


def publish(store: Store, manifest: Manifest, directory: Path, seconds: float) -> None:
    """Make a copied checkpoint visible: wait for the files of all ranks, then write the manifest. Rank 0 calls it.

    Before that, the small files of the run's folder are copied. Raises StoreError if a file of another rank is absent
    after so many seconds without a new one.
    """
    folder = manifest.folder
    for name in small_files(directory):
        content = (directory / name).read_bytes()
        if name == "metrics.jsonl":
            content = content[: content.rfind(b"\n") + 1]  # a line may be half written
        store.write_whole(name, content)
    missing, deadline = len(manifest.files) + 1, time.monotonic() + seconds
    while True:
        present = store.sizes(folder)
        absent = [name for name, (size, _) in manifest.files.items() if present.get(f"{folder}/{name}") != size]
        if not absent:
            break
        if len(absent) < missing:
            missing, deadline = len(absent), time.monotonic() + seconds
        if time.monotonic() > deadline:
            raise StoreError(
                f"another rank has not copied '{absent[0]}' to '{store.address}/{folder}' within {seconds:g} s; "
                f"the logs of the ranks have the reason"
            )
        time.sleep(POLL)
    store.write_whole(f"{folder}/{MANIFEST}", manifest.text)


def copy_alone(store: Store, path: Path, directory: Path) -> Manifest:
    """Copy a checkpoint with all its files from one process. Returns its manifest."""
    copy = Copy(path, all_files(0, 1))
    copy.upload(store)
    publish(store, copy.manifest, directory, 0)
    return copy.manifest
