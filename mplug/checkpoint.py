"""Checkpoints: written aside, made visible by one atomic step, read without running any code from them.

    checkpoints/step_00000100/    checkpoint.json (step, data position, provenance, the files' sizes and checksums)
                                  weights.safetensors · optimizer.safetensors (full logical tensors)
                                  states.safetensors (the tensors of other plugins' state)

Reading goes by placements: each rank copies the boxes that it holds.
"""

import json
import os
import re
import shutil
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import safetensors
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from mplug.contracts import Optimizer, Piece
from mplug.errors import RunError, UsageError
from mplug.model import region
from mplug.plain import lift, lower
from mplug.plan import Placement
from mplug.run import write_text

FORMAT = 1
MANIFEST, WEIGHTS, OPTIMIZER = "checkpoint.json", "weights.safetensors", "optimizer.safetensors"
STATES = "states.safetensors"


def path_of(folder: Path, step: int) -> Path:
    """Where the checkpoint of a step is, once it is complete."""
    return folder / f"step_{step:08d}"


def complete(folder: Path) -> list[Path]:
    """The complete checkpoints of a folder, the oldest first."""
    return sorted(path for path in folder.glob("step_*") if re.fullmatch(r"step_\d{8,}", path.name))


def newest(folder: Path) -> Path:
    """The newest complete checkpoint; UsageError where there is none."""
    found = complete(folder)
    if not found:
        raise UsageError(f"there is no complete checkpoint in '{folder}'; choose another run with --name")
    return found[-1]


# Writing.


def save(
    folder: Path, step: int, pieces: Iterable[Piece], optimizer: Optimizer, facts: Mapping[str, Any], keep: int
) -> Path:
    """Save a checkpoint, then remove all but the newest `keep`. A full disk leaves the earlier ones as they were.

    `facts` is plain data: the data position, other plugins' state, provenance.
    """
    final = path_of(folder, step)
    aside = folder / f".{final.name}.partial"
    try:
        for leftover in folder.glob(".step_*.partial"):
            shutil.rmtree(leftover)
        aside.mkdir(parents=True)
        _write(aside, step, list(pieces), optimizer, facts)
        if final.exists():
            shutil.rmtree(final)
        aside.rename(final)
        _sync(folder)
    except (OSError, safetensors.SafetensorError) as error:
        shutil.rmtree(aside, ignore_errors=True)
        raise RunError(f"cannot save the checkpoint '{final}': {_reason(error)}{_survivor(folder)}") from error
    for old in complete(folder)[:-keep]:
        shutil.rmtree(old)
    return final


def _write(aside: Path, step: int, pieces: list[Piece], optimizer: Optimizer, facts: Mapping[str, Any]) -> None:
    weights = {piece.name: piece.master.contiguous() for piece in pieces}
    states = {
        f"{piece.name}/{name}": tensor.contiguous()
        for piece in pieces
        for name, tensor in optimizer.state(piece).items()
    }
    others: dict[str, Tensor] = {}
    plain = lift(dict(facts), others, "")
    files = {}
    for name, tensors in ((WEIGHTS, weights), (OPTIMIZER, states), (STATES, others)):
        save_file(tensors, aside / name)
        _sync(aside / name)
        files[name] = {"bytes": (aside / name).stat().st_size, "crc32": _crc32(aside / name)}
    manifest = {"format": FORMAT, "step": step, "files": files, **plain}
    write_text(aside / MANIFEST, json.dumps({**manifest, "crc32": _crc32_of(manifest)}, indent=2) + "\n")


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _crc32_of(manifest: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(manifest, sort_keys=True).encode())


def _crc32(path: Path) -> int:
    checksum = 0
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            checksum = zlib.crc32(block, checksum)
    return checksum


def _reason(error: Exception) -> str:
    text = str(error)
    return "no space left on the device" if "os error 28" in text or getattr(error, "errno", None) == 28 else text


def _survivor(folder: Path) -> str:
    found = complete(folder)
    return f"; the earlier checkpoint '{found[-1]}' is intact" if found else ""


# Reading.


def read_manifest(path: Path) -> dict[str, Any]:
    """The plain data of a checkpoint, after its files' sizes and checksums were found right."""
    try:
        manifest: dict[str, Any] = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        if manifest.pop("crc32") != _crc32_of(manifest):
            raise ValueError(f"'{MANIFEST}' is not what was saved")
        if manifest["format"] != FORMAT:
            raise UsageError(f"checkpoint '{path}' has format {manifest['format']}; this mplug reads format {FORMAT}")
        for name, expected in manifest["files"].items():
            if (path / name).stat().st_size != expected["bytes"] or _crc32(path / name) != expected["crc32"]:
                raise ValueError(f"'{name}' is not what was saved")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"checkpoint '{path}' is damaged: {error}; remove it to use the one before it") from error
    lowered: dict[str, Any] = lower(manifest, load_file(path / STATES))
    return lowered


def load_weights(path: Path, parameters: Mapping[str, Tensor], placements: Mapping[str, Placement], rank: int) -> None:
    """Copy a checkpoint's weights into this rank's parameters."""
    with safetensors.safe_open(path / WEIGHTS, framework="pt") as file, torch.no_grad():
        known = set(file.keys())
        for extra in sorted(known - set(parameters)):
            raise UsageError(
                f"checkpoint '{path}' has a parameter '{extra}' that the model lacks; it is of another model"
            )
        for name, parameter in parameters.items():
            if name not in known:
                raise UsageError(f"checkpoint '{path}' has no parameter '{name}'; it is of another model")
            _copy(file, name, parameter, placements[name], rank, path)


def load_optimizer(path: Path, pieces: Iterable[Piece], optimizer: Optimizer, rank: int) -> None:
    """Copy a checkpoint's optimizer state into this rank's."""
    with safetensors.safe_open(path / OPTIMIZER, framework="pt") as file, torch.no_grad():
        known = set(file.keys())
        for piece in pieces:
            for name, tensor in optimizer.state(piece).items():
                key = f"{piece.name}/{name}"
                if key not in known:
                    raise UsageError(f"checkpoint '{path}' has no optimizer state '{key}'; it is of another optimizer")
                if tensor.dim() == 0:
                    tensor.copy_(file.get_tensor(key))
                else:
                    _copy(file, key, tensor, piece.placement, rank, path)


def _copy(file: Any, key: str, local: Tensor, placement: Placement, rank: int, path: Path) -> None:
    saved = file.get_slice(key)
    if tuple(saved.get_shape()) != placement.shape:
        raise UsageError(
            f"checkpoint '{path}' holds '{key}' with shape {tuple(saved.get_shape())}, and the model has "
            f"{placement.shape}; resume with the config that it was saved under"
        )
    for box in placement.boxes(rank):
        start_stop = tuple(slice(s, s + n) for s, n in zip(box.start, box.shape, strict=True))
        region(local, box).copy_(saved[start_stop])
