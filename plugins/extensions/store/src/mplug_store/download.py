"""Copy runs, folders and files of a store to this machine. Every copy is complete before it gets its name."""

import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

from mplug import RunError, UsageError, write_whole
from mplug_store.address import Store
from mplug_store.checkpoints import FOLDER, MANIFEST, Manifest, Stored, parse, stored


def read_manifest(store: Store, one: Stored) -> Manifest:
    """The manifest of a visible checkpoint. RunError if it is damaged or was removed."""
    label = f"{store.address}/{one.folder}"
    text = store.read(f"{one.folder}/{MANIFEST}")
    if text is None:
        raise RunError(f"'{label}' was removed meanwhile")
    return parse(text, label)


def download_checkpoint(store: Store, one: Stored, target: Path) -> None:
    """Copy a checkpoint to a new folder, and compare all checksums. RunError if it is damaged."""
    manifest = read_manifest(store, one)
    target.mkdir(parents=True)
    for name, (_, checksum) in manifest.files.items():
        with (target / name).open("wb") as file:
            if store.copy_to(f"{one.folder}/{name}", file) != checksum:
                raise RunError(f"'{store.address}/{one.folder}/{name}' is damaged")
    write_whole(target / MANIFEST, manifest.text)


def download_newest(store: Store, choices: Iterable[Stored], target: Path) -> tuple[Stored, list[str]]:
    """Copy the newest valid checkpoint of those given, the newest first, to `target`/step_N.

    Returns it, and the reasons why newer ones were skipped. UsageError if none is valid.
    """
    skipped: list[str] = []
    for one in choices:
        folder = target / f"step_{one.step:08d}"
        try:
            download_checkpoint(store, one, folder)
            return one, skipped
        except RunError as error:
            shutil.rmtree(folder, ignore_errors=True)
            skipped.append(str(error))
    raise UsageError("; ".join(skipped) or f"'{store.address}' has no complete checkpoint; use the address of a run")


def newest_first(store: Store) -> list[Stored]:
    """The visible checkpoints of a run in a store, the newest first."""
    return [one for one in reversed(stored(store)) if one.visible]


def download_run(store: Store, target: Path, step: int | None = None) -> tuple[Stored, list[str]]:
    """Copy a run with one checkpoint to the new folder `target`: the newest valid one, or that of a step.

    Returns the checkpoint, and the reasons why newer ones were skipped. UsageError if there is no such run.
    """
    found = newest_first(store)
    choices = [one for one in found if step in (None, one.step)]
    if not choices:
        steps = ", ".join(str(one.step) for one in reversed(found)) or "none"
        wanted = "no complete checkpoint" if step is None else f"no checkpoint of step {step}"
        raise UsageError(f"'{store.address}' has {wanted} (available steps: {steps}); use the address of a run")
    partial = target.with_name(f".{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        newest = download_newest(store, choices, partial / FOLDER)
        for name in store.sizes():
            if not name.startswith(f"{FOLDER}/"):
                (partial / name).parent.mkdir(parents=True, exist_ok=True)
                with (partial / name).open("wb") as file:
                    store.copy_to(name, file)
        partial.rename(target)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return newest


def download_files(store: Store, sizes: Mapping[str, int], target: Path) -> None:
    """Copy files of a folder of a store into the new folder `target`. The file '' is the one that the address names."""
    for name, size in sizes.items():
        path = target / name if name else target
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            store.copy_to(name, file)
        if path.stat().st_size != size:
            raise RunError(f"'{store.address}/{name}' has changed while it was read; try again")
