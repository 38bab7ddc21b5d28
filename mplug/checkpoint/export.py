"""Write the weights of a checkpoint as a published checkpoint: safetensors files, an index, config.json.

At most one public tensor and one box of ours are in memory at a time.
"""

import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import safetensors
import torch
from torch import Tensor

from mplug.checkpoint.index import Index, Shape
from mplug.checkpoint.manifest import name_in_file
from mplug.checkpoint.opened import Opened
from mplug.checkpoint.public_folder import INDEX, WHOLE
from mplug.checkpoint.published import Kept, Published
from mplug.checkpoint.transfer import fill_theirs
from mplug.config.public import CONFIG
from mplug.errors import RunError, UsageError, listed
from mplug.layout.conversion import Conversion
from mplug.model.adapters import Merge, RowNorms, row_norms
from mplug.precisions.dtypes import FORMATS
from mplug.system.files import sync_file, sync_path, write_whole


@dataclass(frozen=True)
class Export:
    """What to write: the form, config.json, the type of tensors that the original folder does not have, shard size."""

    conversion: Conversion
    config: Mapping[str, Any]
    dtype: str
    shard_bytes: int
    original: Published | None = None
    fixed_dtype: str | None = None
    """The type of all tensors, if the user chose one."""
    whole: str = WHOLE
    """The name of the file with the tensors, if there is one file."""
    config_file: str = CONFIG
    merges: Mapping[str, Merge] = field(default_factory=dict)
    """The parameters whose values an export computes from several parameters."""
    offsets: Mapping[str, RowNorms] = field(default_factory=dict)
    """The parameters that an export writes as their sum with norms."""


class CheckpointBoxes:
    """Reads boxes of the parameters and states of a checkpoint."""

    def __init__(self, opened: Opened) -> None:
        self.path, self.index = opened.path, opened.index
        self._files: dict[str, Any] = {}
        self._stack = ExitStack()

    def __enter__(self) -> "CheckpointBoxes":
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def read(self, name: str, start: Shape, shape: Shape) -> Tensor:
        """A box of a parameter or state, from all chunks that overlap it."""
        key = key_of(name, self.index)
        found: Tensor | None = None
        for overlap in self.index.overlaps(key, [(start, shape)]):
            stored = self._opened(overlap.file).get_slice(name_in_file(key, overlap.chunk))
            part: Tensor = stored[tuple(slice(s, s + n) for s, n in zip(overlap.stored, overlap.shape, strict=True))]
            if overlap.shape == shape:
                return part
            found = torch.empty(shape, dtype=part.dtype) if found is None else found
            found[tuple(slice(s, s + n) for s, n in zip(overlap.placed, overlap.shape, strict=True))] = part
        assert found is not None, f"no chunk of '{name}' overlaps the box {start}, {shape}"
        return found

    def _opened(self, file: str) -> Any:
        if file not in self._files:
            opened = safetensors.safe_open(self.path / file, framework="pt")
            self._files[file] = self._stack.enter_context(opened)
        return self._files[file]


class MergedBoxes:
    """Reads boxes of what an export writes: parameters and states of a checkpoint, with their merges and offsets.

    The last merged parameter stays in memory, because neighbouring boxes belong to one parameter.
    """

    def __init__(self, boxes: CheckpointBoxes, export: Export) -> None:
        self.boxes, self.export = boxes, export
        self._last: tuple[str, Tensor] | None = None

    def read(self, name: str, start: Shape, shape: Shape) -> Tensor:
        """A box of a parameter or state."""
        if name in self.export.merges:
            return self._merged(name)[tuple(slice(s, s + n) for s, n in zip(start, shape, strict=True))]
        values, rows = self.boxes.read(name, start, shape), self.export.offsets.get(name)
        if rows is None:
            return values
        weight = self.boxes.read(rows.weight, *_rows_of(self._shape(rows.weight), rows.start + start[0], shape[0]))
        return values + row_norms(weight).to(values.dtype)

    def _merged(self, name: str) -> Tensor:
        if self._last is None or self._last[0] != name:
            self._last = None  # frees the memory before the next parameter is read
            merge = self.export.merges[name]
            shapes = [self._shape(one) for one in merge.inputs]
            wholes = [self.boxes.read(one, (0,) * len(n), n) for one, n in zip(merge.inputs, shapes, strict=True)]
            self._last = (name, merge.compute(*wholes))
        return self._last[1]

    def _shape(self, name: str) -> Shape:
        return self.boxes.index.shapes[key_of(name, self.boxes.index)]


def _rows_of(shape: Shape, start: int, length: int) -> tuple[Shape, Shape]:
    """(start, shape) of the box of some rows of a tensor."""
    return (start, *(0 for _ in shape[1:])), (length, *shape[1:])


def key_of(name: str, index: Index) -> str:
    """The key of a parameter's weight, or of a state, in a checkpoint."""
    return f"{name}/weight" if f"{name}/weight" in index.shapes else f"{name}/buffer"


def export_public(export: Export, opened: Opened, target: Path) -> list[str]:
    """Write the folder `target`, which must not exist; returns the names of its files with tensors.

    The folder becomes visible when it is complete. Raises UsageError for a checkpoint that lacks a parameter, and
    RunError if the folder cannot be written.
    """
    needed = {*export.conversion.links, *(one for merge in export.merges.values() for one in merge.inputs)}
    needed |= {rows.weight for rows in export.offsets.values()}
    missing = [name for name in sorted(needed) if key_of(name, opened.index) not in opened.index.shapes]
    if missing:
        raise UsageError(
            f"checkpoint '{opened.path}' lacks '{missing[0]}', which its model has; use another checkpoint"
        )
    partial = target.with_name(f".{target.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        shards = _write_shards(export, opened, partial)
        _write_files(export, partial)
        sync_path(partial)
        partial.rename(target)
        sync_path(target.parent)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise RunError(f"cannot write '{target}': {error.strerror or error}") from error
    return shards


def _write_shards(export: Export, opened: Opened, folder: Path) -> list[str]:
    made = export.conversion
    kept = {tensor: _kept(export, tensor) for tensor in made.public}
    sizes = {tensor: prod(made.shape(tensor)) * FORMATS[one.dtype].bytes for tensor, one in kept.items()}
    shards = _shards(export, kept, sizes)
    with CheckpointBoxes(opened) as stored:
        boxes = MergedBoxes(stored, export)
        for file, tensors in shards.items():

            def produce(tensor: str) -> Tensor:
                values = torch.empty(made.shape(tensor), dtype=getattr(torch, kept[tensor].dtype))
                fill_theirs(made.public[tensor], values, boxes.read)
                return values

            entries = [(kept[tensor].name, kept[tensor].dtype, made.shape(tensor), tensor) for tensor in tensors]
            write_safetensors(folder / file, entries, produce)
    if list(shards) != [export.whole]:
        index = {
            "metadata": {"total_size": sum(sizes.values())},
            "weight_map": {kept[tensor].name: file for file, tensors in shards.items() for tensor in sorted(tensors)},
        }
        write_whole(folder / INDEX, json.dumps(index, indent=2) + "\n")
    return list(shards)


def _kept(export: Export, tensor: str) -> Kept:
    """The name, file and type of a public tensor in the export."""
    original = export.original.tensors.get(tensor) if export.original is not None else None
    kept = original or Kept(tensor, "", export.dtype)
    is_plain = FORMATS[kept.dtype].is_floating and FORMATS[kept.dtype].bytes > 1
    dtype = export.fixed_dtype or (kept.dtype if is_plain else export.dtype)
    return Kept(kept.name, kept.file, dtype)


def _shards(export: Export, kept: Mapping[str, Kept], sizes: Mapping[str, int]) -> dict[str, list[str]]:
    """The tensors of each file: those of the original folder if it has all of them, else files of limited size."""
    found: dict[str, list[str]] = {}
    if all(one.file for one in kept.values()) and export.fixed_dtype is None:
        for tensor, one in kept.items():
            found.setdefault(one.file, []).append(tensor)
        return dict(sorted(found.items()))
    groups: list[list[str]] = [[]]
    filled = 0
    for tensor, size in sizes.items():
        if groups[-1] and filled + size > export.shard_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(tensor)
        filled += size
    if len(groups) == 1:
        return {export.whole: groups[0]}
    names = (f"model-{number + 1:05d}-of-{len(groups):05d}.safetensors" for number in range(len(groups)))
    return dict(zip(names, groups, strict=True))


def _write_files(export: Export, folder: Path) -> None:
    """Copy the files beside the weights, and write config.json."""
    if export.original is not None:
        shutil.copytree(export.original.files, folder, dirs_exist_ok=True)
        if export.config == export.original.config:
            return
    write_whole(folder / export.config_file, json.dumps(export.config, indent=2) + "\n")


def write_safetensors(
    path: Path, entries: Iterable[tuple[str, str, Shape, str]], produce: Callable[[str], Tensor]
) -> None:
    """Write a safetensors file tensor by tensor; `entries` are (name, type, shape, argument of `produce`)."""
    entries = list(entries)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, dtype, shape, _ in entries:
        begin, end = end, end + prod(shape) * FORMATS[dtype].bytes
        header[name] = {"dtype": FORMATS[dtype].code, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for data in _bytes(entries, produce):
            file.write(data)
        sync_file(file)


def _bytes(entries: Iterable[tuple[str, str, Shape, str]], produce: Callable[[str], Tensor]) -> Iterator[bytes]:
    for _, _, _, argument in entries:
        flat = produce(argument).contiguous().reshape(-1)
        yield flat.view(torch.uint8).numpy().tobytes()


def refuse_lossy(conversion: Conversion, placements: Iterable[str]) -> None:
    """Raise UsageError if an export would drop a parameter. States that public checkpoints do not have are dropped."""
    if lost := sorted(conversion.absent & set(placements)):
        raise UsageError(
            f"the published form of this model has no place for {listed(lost[:3])}"
            f"{f' and {len(lost) - 3} others' if len(lost) > 3 else ''}; export a model without them"
        )
