"""Write the weights of a checkpoint in a format: the host reads the checkpoint, and the format writes its files.

At most one exported tensor and one box of ours are in memory at a time.
"""

import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import safetensors
import torch
from torch import Tensor

from mplug.errors import RunError, UsageError
from mplug.system.files import sync_path
from mplug_pretrained.adapters import row_norms
from mplug_pretrained.published import Export
from mplug_pretrained.transfer import fill_theirs
from mplug_saving.index import Shape
from mplug_saving.manifest import name_in_file
from mplug_saving.opened import Opened


class CheckpointBoxes:
    """Reads boxes of the parameters and states of a checkpoint; with `averages`, those of parameters that have one."""

    def __init__(self, opened: Opened, averages: bool) -> None:
        self.path, self.index, self.averages = opened.path, opened.index, averages
        self._files: dict[str, Any] = {}
        self._stack = ExitStack()

    def __enter__(self) -> "CheckpointBoxes":
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def read(self, name: str, start: Shape, shape: Shape) -> Tensor:
        """A box of a parameter or state, from all chunks that overlap it."""
        key = self.key_of(name)
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

    def key_of(self, name: str) -> str:
        """The key of a parameter's values, or of a state, in the checkpoint."""
        key = self.index.values_of(name, self.averages)
        return key if key in self.index.shapes else f"{name}/buffer"

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
        return self.boxes.index.shapes[self.boxes.key_of(name)]


def _rows_of(shape: Shape, start: int, length: int) -> tuple[Shape, Shape]:
    """(start, shape) of the box of some rows of a tensor."""
    return (start, *(0 for _ in shape[1:])), (length, *shape[1:])


def export_public(export: Export, opened: Opened, target: Path, averages: bool) -> list[str]:
    """Write the folder `target`, which must not exist; returns the names of its files with tensors.

    With `averages`, the values of a parameter are its average, if the checkpoint has one.

    The folder becomes visible when it is complete. Raises UsageError for a checkpoint that lacks a parameter, and
    RunError if the folder cannot be written.
    """
    needed = {*export.conversion.links, *(one for merge in export.merges.values() for one in merge.inputs)}
    needed |= {rows.weight for rows in export.offsets.values()}
    stored = CheckpointBoxes(opened, averages)
    missing = [name for name in sorted(needed) if stored.key_of(name) not in opened.index.shapes]
    if missing:
        raise UsageError(
            f"checkpoint '{opened.path}' lacks '{missing[0]}', which its model has; use another checkpoint"
        )
    partial = target.with_name(f".{target.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        with stored:
            boxes = MergedBoxes(stored, export)

            def values(tensor: str, dtype: str) -> Tensor:
                found = torch.empty(export.conversion.shape(tensor), dtype=getattr(torch, dtype))
                fill_theirs(export.conversion.public[tensor], found, boxes.read)
                return found

            files = export.write(partial, values)
        sync_path(partial)
        partial.rename(target)
        sync_path(target.parent)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise RunError(f"cannot write '{target}': {error.strerror or error}") from error
    return files
