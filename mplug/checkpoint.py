"""Checkpoints: written aside, made visible by one atomic step, read without running any code from them.

    checkpoints/step_00000100/    checkpoint.json (step, data position, provenance, where each box is, checksums)
                                  rank00000.safetensors ... (weights and optimizer state of the boxes that a rank owns)
                                  states.safetensors (the tensors of other plugins' state)

Everything goes by placements: a rank writes the boxes of which it is the first holder, and reads the parts of saved
boxes that lie in its own, so a checkpoint of any layout loads under any other.
"""

import json
import os
import re
import shutil
import zlib
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
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
from mplug.plan import Box, Placement
from mplug.run import Run, write_text

FORMAT = 1
MANIFEST, STATES = "checkpoint.json", "states.safetensors"


def path_of(folder: Path, step: int) -> Path:
    """Where the checkpoint of a step is, once it is complete."""
    return folder / f"step_{step:08d}"


def step_of(path: Path) -> int:
    """The step of a checkpoint."""
    return int(path.name.removeprefix("step_"))


def complete(folder: Path) -> list[Path]:
    """The complete checkpoints of a folder, the oldest first."""
    return sorted(path for path in folder.glob("step_*") if re.fullmatch(r"step_\d{8,}", path.name))


def newest(folder: Path) -> Path:
    """The newest complete checkpoint; UsageError where there is none."""
    found = complete(folder)
    if not found:
        raise UsageError(f"there is no complete checkpoint in '{folder}'; choose another run with --name")
    return found[-1]


def file_of(rank: int) -> str:
    """The file of a rank's boxes."""
    return f"rank{rank:05d}.safetensors"


# Writing.


def save(run: Run, pieces: list[Piece], optimizer: Optimizer, placements: Iterable[Placement], facts: Any) -> Path:
    """Save a checkpoint on all ranks together, then remove all but the newest `checkpoint.keep`.

    `facts` is plain data and tensors: the data position, other plugins' state, provenance. A full disk leaves the
    earlier checkpoints as they were and raises RunError on every rank.
    """
    folder, final = run.checkpoints, path_of(run.checkpoints, run.step)
    aside = folder / f".{final.name}.partial"
    fault = _attempt(lambda: _prepare(folder, aside)) if run.rank == 0 else ""
    _refuse_fault(run.gathered(fault), final)
    files: dict[str, Any] = {}
    fault = _attempt(lambda: files.update(_write(aside / file_of(run.rank), run.rank, pieces, optimizer)))
    everyone = run.gathered((fault, files))
    _refuse_fault([fault for fault, _ in everyone], final)
    if run.rank == 0:
        written = {name: described for _, files in everyone for name, described in files.items()}
        tensors = {placement.name: _described(placement) for placement in placements}
        manifest = {"format": FORMAT, "step": run.step, "files": written, "tensors": tensors}
        fault = _attempt(lambda: _publish(aside, final, manifest, facts))
    _refuse_fault(run.gathered(fault), final)
    if run.rank == 0:
        for old in complete(folder)[: -run.config.checkpoint.keep]:
            shutil.rmtree(old)
    return final


def _attempt(action: Any) -> str:
    """Why an action failed; the empty string where it did not."""
    try:
        action()
    except (OSError, safetensors.SafetensorError) as error:
        full = "os error 28" in str(error) or getattr(error, "errno", None) == 28
        return "no space left on the device" if full else str(error)
    return ""


def _refuse_fault(faults: list[str], final: Path) -> None:
    for rank, fault in enumerate(faults):
        if fault:
            aside = final.with_name(f".{final.name}.partial")
            shutil.rmtree(aside, ignore_errors=True)
            found = complete(final.parent)
            survivor = f"; the earlier checkpoint '{found[-1]}' is intact" if found else ""
            where = f" on rank {rank}" if len(faults) > 1 else ""
            raise RunError(f"cannot save the checkpoint '{final}'{where}: {fault}{survivor}")


def _prepare(folder: Path, aside: Path) -> None:
    for leftover in folder.glob(".step_*.partial"):
        shutil.rmtree(leftover)
    aside.mkdir(parents=True)


def _write(path: Path, rank: int, pieces: list[Piece], optimizer: Optimizer) -> dict[str, Any]:
    tensors: dict[str, Tensor] = {}
    for piece in pieces:
        local = {"weight": piece.master, **optimizer.state(piece)}
        for number, box in _owned(piece.placement, rank):
            for name, tensor in local.items():
                whole = tensor.dim() == 0
                tensors[_key(piece.name, name, number)] = (tensor if whole else region(tensor, box)).clone()
    return _write_file(path, tensors)


def _write_file(path: Path, tensors: dict[str, Tensor]) -> dict[str, Any]:
    save_file(tensors, path)
    _sync(path)
    return {path.name: {"bytes": path.stat().st_size, "crc32": _crc32(path)}}


def _owned(placement: Placement, rank: int) -> list[tuple[int, Box]]:
    return [(number, box) for number, box in enumerate(placement.boxes(rank)) if min(box.copies) == rank]


def _key(parameter: str, tensor: str, box: int) -> str:
    return f"{parameter}/{tensor}/{box}"


def _described(placement: Placement) -> dict[str, Any]:
    """A parameter's logical shape, and its boxes as [rank, number, start, shape]."""
    boxes = [
        [rank, number, box.start, box.shape] for rank in placement.holders for number, box in _owned(placement, rank)
    ]
    return {"shape": placement.shape, "boxes": boxes}


def _publish(aside: Path, final: Path, manifest: dict[str, Any], facts: Mapping[str, Any]) -> None:
    """Write what rank 0 writes for all, then make the checkpoint visible."""
    states: dict[str, Tensor] = {}
    manifest |= lift(dict(facts), states, "")
    manifest["files"] |= _write_file(aside / STATES, states)
    manifest = json.loads(json.dumps(manifest))  # as it will be read
    write_text(aside / MANIFEST, json.dumps({**manifest, "crc32": _crc32_of(manifest)}) + "\n")
    if final.exists():
        shutil.rmtree(final)
    aside.rename(final)
    _sync(final.parent)


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


class Reader:
    """Copies parts of saved boxes into a rank's local tensors. A context manager: it holds files open."""

    def __init__(self, path: Path, manifest: Mapping[str, Any], rank: int) -> None:
        self.path, self.tensors, self.rank = path, manifest["tensors"], rank
        self._files: dict[int, Any] = {}
        self._open = ExitStack()

    def __enter__(self) -> "Reader":
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def load(self, placement: Placement, tensor: str, local: Tensor) -> None:
        """Fill `local`, this rank's part of one of a parameter's tensors ('weight', or the optimizer's)."""
        saved = self.tensors.get(placement.name)
        if saved is None:
            raise UsageError(f"checkpoint '{self.path}' has no parameter '{placement.name}'; it is of another model")
        if tuple(saved["shape"]) != placement.shape:
            raise UsageError(
                f"checkpoint '{self.path}' holds '{placement.name}' with shape {tuple(saved['shape'])}, and the model "
                f"has {placement.shape}; resume with the config that it was saved under"
            )
        if local.dim() == 0:
            rank, number, *_ = saved["boxes"][0]
            local.copy_(self._file(rank).get_tensor(self._existing(rank, _key(placement.name, tensor, number))))
            return
        for box in placement.boxes(self.rank):
            target = region(local, box)
            for rank, number, start, shape in saved["boxes"]:
                self._copy_common(target, box, rank, _key(placement.name, tensor, number), start, shape)

    def _copy_common(self, target: Tensor, box: Box, rank: int, key: str, start: list[int], shape: list[int]) -> None:
        low = [max(a, b) for a, b in zip(box.start, start, strict=True)]
        high = [min(a + n, b + m) for a, n, b, m in zip(box.start, box.shape, start, shape, strict=True)]
        if all(a < b for a, b in zip(low, high, strict=True)):
            there = tuple(slice(a - s, b - s) for a, b, s in zip(low, high, start, strict=True))
            here = tuple(slice(a - s, b - s) for a, b, s in zip(low, high, box.start, strict=True))
            target[here].copy_(self._file(rank).get_slice(self._existing(rank, key))[there])

    def _existing(self, rank: int, key: str) -> str:
        if key not in self._keys(rank):
            raise UsageError(f"checkpoint '{self.path}' has no '{key}'; it is of another optimizer")
        return key

    def _keys(self, rank: int) -> set[str]:
        return set(self._file(rank).keys())

    def _file(self, rank: int) -> Any:
        if rank not in self._files:
            opened = safetensors.safe_open(self.path / file_of(rank), framework="pt")
            self._files[rank] = self._open.enter_context(opened)
        return self._files[rank]


@torch.no_grad()
def load_weights(reader: Reader, tensors: Mapping[str, Tensor], placements: Mapping[str, Placement]) -> None:
    """Fill this rank's parameters, or their masters; `placements` are those of the whole model."""
    for extra in sorted(set(reader.tensors) - set(placements)):
        raise UsageError(
            f"checkpoint '{reader.path}' has a parameter '{extra}' that the model lacks; it is of another model"
        )
    for name, tensor in tensors.items():
        reader.load(placements[name], "weight", tensor)


@torch.no_grad()
def load_optimizer(reader: Reader, pieces: Iterable[Piece], optimizer: Optimizer) -> None:
    """Fill this rank's optimizer state."""
    for piece in pieces:
        for name, tensor in optimizer.state(piece).items():
            reader.load(piece.placement, name, tensor)
