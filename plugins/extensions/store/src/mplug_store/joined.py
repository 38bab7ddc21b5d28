"""Complete the folder of a run on one machine from the store that has joined the parts of all machines."""

import shutil
import zlib
from glob import escape
from pathlib import Path
from uuid import uuid4

from mplug import RunError, UsageError, write_whole
from mplug_store.address import Store
from mplug_store.checkpoints import FOLDER, IDENTITY, MANIFEST, Stored, parse
from mplug_store.download import newest_first, read_manifest

METRICS = "metrics.jsonl"


class Joined:
    """What the host asks of a store if the machines of a run have folders of their own (`gather_checkpoints`)."""

    def __init__(self, address: str) -> None:
        self.address = address.rstrip("/")

    def complete(self, directory: Path) -> None:
        """Bring the newest valid checkpoint in the store to a run's folder on this machine."""
        complete(Store(f"{self.address}/{directory.name}"), directory)


def complete(store: Store, directory: Path) -> Stored | None:
    """Make a run's folder complete: its newest checkpoint, and the small files that it lacks. None if there is none.

    Files that the folder has with the right checksum are not read from the store. A checkpoint of a later step that is
    not complete on this machine is removed: its other parts may be on other machines, but not in the store.
    """
    refuse_folder_of_another(store, directory)
    newest = None
    for one in newest_first(store):
        try:
            _complete_checkpoint(store, one, directory / FOLDER / f"step_{one.step:08d}")
            newest = one
            break
        except RunError as error:
            reason = str(error)
    else:
        if newest_first(store):
            raise UsageError(f"no checkpoint in '{store.address}' is valid: {reason}")
    for path in sorted((directory / FOLDER).glob("step_*")):
        if path.name > f"step_{newest.step if newest else 0:08d}" and not _is_complete(path):
            _remove(path)
    for name, size in store.sizes().items():
        path = directory / name
        grown = name == METRICS and path.exists() and path.stat().st_size < size
        if not name.startswith(f"{FOLDER}/") and (grown or not path.exists()):
            _fetch(store, name, path)
    return newest


def refuse_folder_of_another(store: Store, directory: Path) -> None:
    """Raise UsageError if a run's folder belongs to another run than the folder in the store."""
    path = directory / IDENTITY
    if path.exists() and (found := store.read(IDENTITY)) is not None and path.read_bytes() != found:
        raise UsageError(f"'{directory}' is another run than '{store.address}'; use another name or address")


def _complete_checkpoint(store: Store, one: Stored, target: Path) -> None:
    """Add the files of a checkpoint that are missing or differ. The manifest is the last one, as in a save."""
    manifest = read_manifest(store, one)
    target.mkdir(parents=True, exist_ok=True)
    if (target / MANIFEST).exists() and (target / MANIFEST).read_bytes() != manifest.text:
        (target / MANIFEST).unlink()  # of another save of this step
    for name, (_, checksum) in manifest.files.items():
        path = target / name
        if path.exists() and _checksum(path) == checksum:
            continue
        if _fetch(store, f"{one.folder}/{name}", path) != checksum:
            path.unlink()
            raise RunError(f"'{store.address}/{one.folder}/{name}' is damaged")
    write_whole(target / MANIFEST, manifest.text)


def _fetch(store: Store, name: str, path: Path) -> int:
    """Copy a file to a path, where it appears when it is complete. Returns its CRC-32.

    What a killed process has left of the file is removed.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    for left in path.parent.glob(f".{escape(path.name)}.*.partial"):
        left.unlink(missing_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid4().hex}.partial")
    try:
        with temporary.open("wb") as file:
            checksum = store.copy_to(name, file)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return checksum


def _checksum(path: Path) -> int:
    checksum = 0
    with path.open("rb") as file:
        while part := file.read(16 << 20):
            checksum = zlib.crc32(part, checksum)
    return checksum


def _is_complete(path: Path) -> bool:
    """Whether a checkpoint on this machine has all files, of the right sizes."""
    try:
        manifest = parse((path / MANIFEST).read_bytes(), str(path))
        return all((path / name).stat().st_size == size for name, (size, _) in manifest.files.items())
    except (RunError, OSError):
        return False


def _remove(path: Path) -> None:
    set_aside = path.with_name(f".{path.name}.{uuid4().hex}.partial")
    path.rename(set_aside)
    shutil.rmtree(set_aside)
