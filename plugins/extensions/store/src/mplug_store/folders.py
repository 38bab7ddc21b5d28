"""What commands read from stores, through a cache on this machine, and the folders that they write to stores."""

import fcntl
import hashlib
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from mplug import RunError, UsageError
from mplug_store.address import Store
from mplug_store.checkpoints import FOLDER
from mplug_store.download import download_files, download_run, newest_first

LAST = ("checkpoint.json", "config.json", "adapter_config.json")
"""Files by which a folder is recognised: they are written last, so a folder is recognised when it is complete."""


class Folders:
    """The stores that the host asks for addresses such as 's3://bucket/model' (the group 'mplug.stores')."""

    def local_copy(self, address: str, beginning: str = "") -> Path:
        """A copy of a folder or file on this machine, in the cache. Of a run, it has the newest valid checkpoint.

        With `beginning`, it has only the files directly in the folder whose names begin so. The copy of an unchanged
        folder is used again. Processes of one machine share it. A copy is never changed: if the folder in the store
        changes, it gets a new copy, and the old one is removed by the user.
        """
        store = Store(address)
        listing = store.listing()
        if beginning:
            listing = {name: one for name, one in listing.items() if name.startswith(beginning) and "/" not in name}
        if not listing:
            named = f"{address}/{beginning}*" if beginning else address
            raise UsageError(f"there is nothing at '{named}'; use another address, or a folder of this machine")
        runs = not beginning and any(name.startswith(f"{FOLDER}/") for name in listing)
        if runs and not newest_first(store):
            raise UsageError(f"'{address}' has no complete checkpoint; use the address of a run, or wait for its copy")
        content = hashlib.sha256(repr(sorted(listing.items())).encode()).hexdigest()[:16]
        target = (
            cache() / re.sub(r"[^A-Za-z0-9._-]+", "_", store.address)[-100:] / content / store.address.split("/")[-1]
        )
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(target.parent / ".lock"):
            if not target.exists():
                if runs:
                    download_run(store, target)
                else:
                    _download(store, target, {name: size for name, (size, _) in listing.items()})
        return target

    def refuse_existing(self, address: str) -> None:
        """Raise UsageError if a store has a file at an address, or if the store cannot be used."""
        store = Store(address)
        if store.sizes():
            raise UsageError(f"'{address}' exists already; use another address, or remove it")

    def deliver(self, folder: Path, address: str) -> None:
        """Copy a folder of this machine to a store. The file by which it is recognised is written last."""
        store = Store(address)
        files = [path for path in folder.rglob("*") if path.is_file()]
        names = sorted((path.relative_to(folder).as_posix() for path in files), key=lambda one: (one in LAST, one))
        for name in names:
            if name in LAST:
                store.write_whole(name, (folder / name).read_bytes())
            else:
                with (folder / name).open("rb") as file:
                    store.write(name, file)


def cache() -> Path:
    """The folder of the copies: MPLUG_CACHE, or mplug/stores in the user's cache."""
    given = os.environ.get("MPLUG_CACHE")
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mplug"
    return (Path(given).expanduser() if given else base) / "stores"


def _download(store: Store, target: Path, sizes: Mapping[str, int]) -> None:
    partial = target.with_name(f".{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.unlink(missing_ok=True)
    try:
        download_files(store, sizes, partial)
        partial.rename(target)
    except OSError as error:
        raise RunError(f"cannot copy '{store.address}' to '{target}': {error.strerror or error}") from error


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Only one process of this machine is in the block. The lock ends with its process."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
