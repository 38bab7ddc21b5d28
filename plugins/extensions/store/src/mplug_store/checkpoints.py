"""The form of a run in a store: which checkpoints it has, and which of their files.

ADDRESS/config.yaml, record.json, ...                  the small files of the run's folder
ADDRESS/checkpoints/step_00000500.1a2b3c4d/            a checkpoint, as on the disk: the number is the CRC-32 of its
    rank00000.safetensors ...                          manifest, so another checkpoint of the step is another folder
    checkpoint.json                                    the manifest, written last: with it, the checkpoint is visible
"""

import json
import re
import zlib
from dataclasses import dataclass
from pathlib import Path

from mplug import RunError
from mplug_store.address import PARTIAL, Store

IDENTITY = "store.json"
"""The file in a run's folder, and in its copy, that says to which run the copy belongs."""
MANIFEST = "checkpoint.json"
FOLDER = "checkpoints"
_NAME = re.compile(rf"{FOLDER}/(step_([0-9]{{8,18}})\.[0-9a-f]{{8}})/([^/]+)")


@dataclass(frozen=True)
class Manifest:
    """The manifest of a checkpoint: its text, and the (size, CRC-32) of each file."""

    text: bytes
    step: int
    files: dict[str, tuple[int, int]]

    @property
    def folder(self) -> str:
        """The folder of the checkpoint in a store."""
        return f"{FOLDER}/step_{self.step:08d}.{zlib.crc32(self.text):08x}"


def parse(text: bytes, label: str) -> Manifest:
    """The manifest of a checkpoint. RunError if the text is none; `label` names the checkpoint."""
    try:
        plain = json.loads(text)
        files = {str(name): (int(one["bytes"]), int(one["crc32"])) for name, one in plain["files"].items()}
        found = Manifest(text, int(plain["step"]), files)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise RunError(f"'{label}' has no valid {MANIFEST}") from None
    if any(Path(name).name != name or name.startswith(".") for name in files):
        raise RunError(f"'{label}' names files outside of its folder")
    return found


@dataclass(frozen=True)
class Stored:
    """A checkpoint in a store, or what an upload has left of one. `sizes` are those of its files, by name."""

    folder: str
    step: int
    sizes: dict[str, int]

    @property
    def visible(self) -> bool:
        """Whether the manifest is there, which is written last."""
        return MANIFEST in self.sizes


def stored(store: Store) -> list[Stored]:
    """The checkpoints in a store and the rests of uploads, by step."""
    found: dict[str, Stored] = {}
    for name, size in store.sizes(FOLDER).items():
        match = _NAME.fullmatch(name)
        if match is not None:
            folder = f"{FOLDER}/{match[1]}"
            found.setdefault(folder, Stored(folder, int(match[2]), {})).sizes[match[3]] = size
    return sorted(found.values(), key=lambda one: (one.step, one.folder))


def remove(store: Store, one: Stored) -> None:
    """Remove a checkpoint. Its manifest goes first, so that no checkpoint with missing files is visible."""
    names = sorted(one.sizes, key=lambda name: (name != MANIFEST, name))
    store.remove(f"{one.folder}/{name}" for name in names)


def prune(store: Store, newest: Manifest, keep: int) -> list[str]:
    """Remove what the checkpoint `newest`, which has become visible, makes obsolete. Returns the removed folders.

    These are checkpoints of later steps, others of the same step, older ones beyond the `keep` newest, and what
    uploads of earlier steps have left. Ranks upload the steps in order, so no upload of an earlier step is under way.
    """
    found = [one for one in stored(store) if one.folder != newest.folder]
    older = [one for one in found if one.visible and one.step < newest.step]
    kept = {one.folder for one in older[len(older) - min(len(older), keep - 1) :]}
    gone = [one for one in found if one.folder not in kept and (one.visible or one.step <= newest.step)]
    for one in gone:
        remove(store, one)
    return [one.folder for one in gone]


def small_files(directory: Path) -> list[str]:
    """The names of the files of a run's folder that a copy has beside checkpoints: its own, and what exports need."""
    found = [path for path in directory.iterdir() if path.is_file()]
    found += [path for path in (directory / "published").rglob("*") if path.is_file()]
    names = (path.relative_to(directory).as_posix() for path in found if not path.is_symlink())
    return sorted(name for name in names if not name.startswith(".") and not name.endswith(PARTIAL))
