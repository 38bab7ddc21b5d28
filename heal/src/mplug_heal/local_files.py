"""The files of local checkpoints: for each part of a run's state a safetensors file, and a small one that completes it.

    FOLDER/gpt-small-5f0c.../step_00000040.8d31.../    rank00003.safetensors   the tensors that rank 3 owns
                                                       rank00003.json          its size and checksum, written last

A part is complete if it has both files. Its tensors have names as in a checkpoint. The part of rank 0 also has the
plain data of a checkpoint (position, states, config). All that describes the tensors is in the metadata of the
safetensors file, which the checksum covers.
"""

import json
import logging
import shutil
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import torch
from safetensors.torch import save_file

from mplug.system.files import sync_path, write_whole
from mplug_saving.boxes import Boxed, State
from mplug_saving.manifest import name_in_file
from mplug_saving.names import SUFFIX, file_of, path_of, step_of
from mplug_saving.plain_data import lift, lower
from mplug_saving.reading import checksum_of, open_file, parse_json, read_header, read_small

log = logging.getLogger("mplug")

FORMAT = 1
ABOUT = "mplug"
"""The key of a file's metadata."""


@dataclass(frozen=True, order=True)
class Key:
    """A local checkpoint: its step, and the identity of this save of the step."""

    step: int
    save: str

    def folder(self, root: Path) -> Path:
        """The folder with its parts on a disk."""
        return path_of(root, self.step).with_suffix(f".{self.save}")


@dataclass(frozen=True)
class Part:
    """A part of a run's state: what one of `size` ranks owns; that of rank 0 has the `plain` data of a checkpoint."""

    size: int
    state: State
    facts: Mapping[str, Any] | None = None
    plain: Mapping[str, Any] | None = None


def write_part(folder: Path, rank: int, part: Part) -> None:
    """Write the part of a rank, whole or not at all. OSError if that fails."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / file_of(rank)
    temporary = path.with_name(f".{path.name}.partial")
    extra: dict[str, torch.Tensor] = {}
    about = {
        "format": FORMAT,
        "size": part.size,
        "shapes": {name: boxed.shape for name, boxed in part.state.items()},
        "facts": part.facts,
        "plain": lift(part.plain, extra, "") if part.plain is not None else None,
        "extra": [*extra],
    }
    tensors = {name_in_file(name, at): one for name, boxed in part.state.items() for at, one in boxed.parts.items()}
    tensors |= {name: one.detach().cpu().contiguous() for name, one in extra.items()}
    try:
        _save(tensors, temporary, json.dumps(about))
        sync_path(temporary)
        with open_file(folder, temporary.name) as file:
            checksum = checksum_of(file)
        size = temporary.stat().st_size
        temporary.replace(path)
        sync_path(folder)
        write_whole(_seal(path), json.dumps({"size": part.size, "bytes": size, "crc32": checksum}))
        sync_path(folder)
    except OSError:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def _save(tensors: Mapping[str, torch.Tensor], path: Path, about: str) -> None:
    try:
        save_file({name: one.contiguous() for name, one in tensors.items()}, path, {ABOUT: about})
    except safetensors.SafetensorError as error:  # of a full disk, for example
        raise OSError(str(error)) from error


def found_on(root: Path) -> dict[Key, tuple[int, list[int]]]:
    """The local checkpoints of a run on a disk: (number of all parts, those that are complete here)."""
    found: dict[Key, tuple[int, list[int]]] = {}
    for folder in sorted(root.glob("step_*.*")):
        for seal in sorted(folder.glob("rank*.json")):
            with suppress(ValueError, OSError, KeyError, TypeError):  # a damaged one counts as none
                key = Key(step_of(folder.with_suffix("")), folder.suffix[1:])
                size = int(parse_json(read_small(folder, seal.name), seal.name)["size"])
                rank = int(seal.stem.removeprefix("rank"))
                found.setdefault(key, (size, []))[1].append(rank)
    return found


def read_part(folder: Path, rank: int) -> Part:
    """A part. ValueError with the reason if it is damaged, OSError if it cannot be read."""
    name = file_of(rank)
    try:
        seal = parse_json(read_small(folder, _seal(folder / name).name), name)
        with open_file(folder, name) as file:
            if checksum_of(file) != seal["crc32"]:
                raise ValueError("it has changed since it was saved")
            file.seek(0)
            read_header(file, name, seal["bytes"])
    except (KeyError, TypeError) as error:
        raise ValueError(f"its description lacks {error}") from error
    with safetensors.safe_open(folder / name, framework="pt") as opened:
        about = json.loads(opened.metadata()[ABOUT])
        if about["format"] != FORMAT:
            raise ValueError(f"it has format {about['format']}, and this version of mplug reads {FORMAT}")
        state = {tensor: Boxed(tuple(shape), {}) for tensor, shape in about["shapes"].items()}
        extra = {tensor: opened.get_tensor(tensor) for tensor in about["extra"]}
        for key in set(opened.keys()) - extra.keys():
            tensor, _, start = key.rpartition("@")
            state[tensor].parts[tuple(map(int, start.split(","))) if start else ()] = opened.get_tensor(key)
    plain = about["plain"]
    return Part(about["size"], state, about["facts"], None if plain is None else lower(plain, extra))


def remove_parts(folder: Path, ranks: Iterable[int]) -> None:
    """Remove parts from a disk, and the folder if it is empty. A failure is logged."""
    try:
        for rank in ranks:
            path = folder / file_of(rank)
            for file in (_seal(path), path, path.with_name(f".{path.name}.partial")):
                file.unlink(missing_ok=True)
        with suppress(OSError):  # another rank of this machine has its parts there
            folder.rmdir()
    except OSError as error:
        log.warning("cannot remove parts of the local checkpoint '%s': %s", folder, error)


def remove_others(root: Path, kept: Iterable[Key]) -> None:
    """Remove all local checkpoints of a run from a disk but those to keep. A failure is logged."""
    folders = {key.folder(root) for key in kept}
    for folder in root.glob("step_*.*"):
        if folder not in folders:
            try:
                shutil.rmtree(folder)
            except OSError as error:
                log.warning("cannot remove the local checkpoint '%s': %s", folder, error)


def _seal(path: Path) -> Path:
    """The file that completes a part."""
    return path.with_name(path.name.removesuffix(SUFFIX) + ".json")
