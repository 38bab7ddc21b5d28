"""Checkpoints: written aside, made visible by one atomic step, read without running any code from them.

    checkpoints/step_00000100/    checkpoint.json (step, data position, provenance, where each box is, checksums)
                                  rank00000.safetensors ... (weights and optimizer state of the boxes that a rank owns)

torch.distributed.checkpoint plans and coordinates (`saver.py`, `boxes.py`); what lies on the disk is safetensors and
JSON (`storage.py`). Everything goes by placements: a rank writes the boxes of which it is the first holder, and reads
the parts of saved boxes that lie in its own, so a checkpoint of any layout loads under any other.

This module is the folder as it lies there, and imports no torch.
"""

import json
import re
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from mplug.errors import UsageError, listed

FORMAT = 2
MANIFEST = "checkpoint.json"


def path_of(folder: Path, step: int) -> Path:
    """Where the checkpoint of a step is, once it is complete."""
    return folder / f"step_{step:08d}"


def step_of(path: Path) -> int:
    """The step of a checkpoint."""
    return int(path.name.removeprefix("step_"))


def aside_of(final: Path) -> Path:
    """Where a checkpoint is written before it is complete, and where an old one goes before it is removed."""
    return final.with_name(f".{final.name}.partial")


def complete(folder: Path) -> list[Path]:
    """The complete checkpoints of a folder, the oldest first."""
    found = (path for path in folder.glob("step_*") if re.fullmatch(r"step_\d{8,}", path.name))
    return sorted(found, key=step_of)


def newest(folder: Path) -> Path:
    """The newest complete checkpoint; UsageError where there is none."""
    found = complete(folder)
    if not found:
        raise UsageError(f"there is no complete checkpoint in '{folder}'; choose another run with --name")
    return found[-1]


def newest_sound(folder: Path) -> Path | None:
    """The newest complete checkpoint of which every file is what was saved; None where there is none."""
    for path in reversed(complete(folder)):
        try:
            manifest = read_manifest(path)
            verify(path, manifest, manifest["files"])
        except UsageError:
            continue
        return path
    return None


def at_step(folder: Path, step: int | None) -> Path:
    """The complete checkpoint of a step, or the newest; UsageError where there is none."""
    if step is None:
        return newest(folder)
    path = path_of(folder, step)
    if not path.is_dir():
        known = listed(str(step_of(found)) for found in complete(folder))
        raise UsageError(f"there is no checkpoint of step {step} in '{folder}' (steps there: {known})")
    return path


def read_manifest(path: Path) -> dict[str, Any]:
    """The plain data of a checkpoint, once it and its files' sizes are found right; UsageError where they are not."""
    try:
        manifest: dict[str, Any] = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        if manifest["format"] != FORMAT:
            raise UsageError(f"checkpoint '{path}' has format {manifest['format']}; this mplug reads format {FORMAT}")
        if manifest.pop("crc32") != crc32_of(manifest):
            raise ValueError(f"'{MANIFEST}' is not what was saved")
        for name, expected in manifest["files"].items():
            if (path / name).stat().st_size != expected["bytes"]:
                raise ValueError(f"'{name}' is not what was saved")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise damaged(path, str(error)) from error
    return manifest


def verify(path: Path, manifest: Mapping[str, Any], names: Iterable[str]) -> None:
    """Read files whole and compare their checksums; UsageError names the first that is not what was saved."""
    for name in names:
        try:
            if crc32(path / name) != manifest["files"][name]["crc32"]:
                raise ValueError(f"'{name}' is not what was saved")
        except (OSError, ValueError) as error:
            raise damaged(path, str(error)) from error


def damaged(path: Path, reason: str) -> UsageError:
    """What to tell about a checkpoint that is not what was saved."""
    return UsageError(f"checkpoint '{path}' is damaged: {reason}; remove it to use the one before it")


def crc32_of(manifest: Mapping[str, Any]) -> int:
    """The checksum of a manifest."""
    return zlib.crc32(json.dumps(manifest, sort_keys=True).encode())


def crc32(path: Path) -> int:
    """The checksum of a file."""
    checksum = 0
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            checksum = zlib.crc32(block, checksum)
    return checksum
