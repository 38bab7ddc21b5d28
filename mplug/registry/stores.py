"""Addresses of object stores, such as 's3://bucket/model', in the place of paths. Imports no torch."""

from functools import cache
from pathlib import Path
from typing import Protocol

from mplug.errors import UsageError
from mplug.registry.asking import asking
from mplug.registry.provided import needed


class Stores(Protocol):
    """What the host, which knows no protocol, asks of the class of the group. Errors are UsageError and RunError."""

    def local_copy(self, address: str, beginning: str = "") -> Path:
        """A complete copy of a folder or file on this machine, which is never changed. Of a run, it has a checkpoint.

        With `beginning`, the copy of a folder has only the files directly in it whose names begin so. Every process of
        a run calls it. A copy of unchanged files is made once on a machine.
        """

    def refuse_existing(self, address: str) -> None:
        """Raise UsageError if there is a folder or file at an address, or if the store refuses the user."""

    def deliver(self, folder: Path, address: str) -> None:
        """Copy a folder of this machine to an address. Readers recognise the copy when it is complete."""


def is_address(text: str) -> bool:
    """Whether a text is the address of a store, and not a path."""
    return "://" in text


def local_path(text: str) -> Path:
    """The path that a text names. The address of a store names its copy on this machine, which is made now."""
    return _copied(text) if is_address(text) else Path(text).expanduser()


def local_prefix(text: str) -> Path:
    """The path without suffixes that several files of a folder share: 'data/corpus' of corpus.bin and corpus.idx.

    If the text is the address of a store, only these files of the folder are copied to this machine.
    """
    if not is_address(text):
        return Path(text).expanduser()
    folder, _, name = text.rpartition("/")
    if not name or folder.endswith("/"):
        raise UsageError(f"'{text}' names no files; use the address of files without suffixes, s3://BUCKET/FOLDER/NAME")
    return _copied(folder, f"{name}.") / name


@cache
def _copied(address: str, beginning: str = "") -> Path:
    """A process asks for the copy of an address once, so it reads one version of it."""
    return stores_for(address).local_copy(address, beginning)


def stores_for(address: str) -> Stores:
    """What reads and writes addresses. UsageError if no installed distribution does, or several do."""
    with asking("mplug.stores", address):
        found: Stores = needed("stores", f"'{address}', the address of a store", "mplug-store")
        return found
