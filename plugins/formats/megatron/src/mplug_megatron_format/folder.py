"""Read a Megatron-LM checkpoint in the format `torch_dist`, without running code from it.

    iter_0001000/    .metadata (pickle: shapes, and the place of each chunk) · __0_0.distcp ... (chunks, each a small
                     file of torch.save) · common.pt (pickle: the arguments of the run) · metadata.json

The pickles are read by an unpickler that knows the classes below and nothing else. Whatever they contain beside these
becomes an object without content.
"""

import argparse
import io
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import filesystem, metadata

from mplug import RunError, UsageError, brief

METADATA, COMMON, LATEST = ".metadata", "common.pt", "latest_checkpointed_iteration.txt"
LARGEST = 1 << 30
"""Maximum size in bytes of a pickle."""
_BUILTINS = (set, frozenset, list, dict, tuple, int, float, str, bytes, slice)
_OF_METADATA = ("Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata")
_KNOWN: dict[tuple[str, str], Any] = {
    **{("builtins", kind.__name__): kind for kind in _BUILTINS},
    **{("torch.distributed.checkpoint.metadata", name): getattr(metadata, name) for name in _OF_METADATA},
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): filesystem._StorageInfo,
    ("torch", "Size"): torch.Size,
    ("collections", "OrderedDict"): OrderedDict,
    ("argparse", "Namespace"): argparse.Namespace,
}
"""Module and name -> the class that a pickle may create: containers of numbers and texts."""


class _Inert:
    """What stands for an object of any other class: it ignores everything that a pickle does to it."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        pass

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def __call__(self, *arguments: Any, **named: Any) -> "_Inert":
        return self

    def append(self, value: Any) -> None:
        """Nothing."""

    def extend(self, values: Any) -> None:
        """Nothing."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        return _KNOWN.get((module, name), _Inert)

    def persistent_load(self, pid: Any) -> Any:
        return _Inert()


@dataclass(frozen=True)
class Chunk:
    """A part of a tensor: its start and shape, and its place in a file."""

    start: tuple[int, ...]
    shape: tuple[int, ...]
    file: str
    offset: int
    length: int


class MegatronFolder:
    """The tensors of a checkpoint, by name; `shapes` are their global shapes."""

    def __init__(self, path: Path) -> None:
        self.path = _newest(path)
        self.chunks, self.shapes = self._index()
        self._last: tuple[Chunk, Tensor] | None = None

    @cached_property
    def arguments(self) -> Mapping[str, Any]:
        """The arguments of the Megatron run that are numbers, texts or flags; empty if the checkpoint has none."""
        path = self.path / COMMON
        if not path.is_file():
            return {}
        try:
            with zipfile.ZipFile(path) as archive:
                (name,) = (name for name in archive.namelist() if name.endswith("/data.pkl"))
                found = _Unpickler(io.BytesIO(archive.read(name))).load()
        except Exception as error:  # a damaged pickle can raise anything
            raise _damaged(path, error) from None
        arguments = found.get("args") if isinstance(found, dict) else None
        fields = vars(arguments) if isinstance(arguments, argparse.Namespace) else {}
        return {name: value for name, value in fields.items() if isinstance(value, int | float | str)}

    def read(self, name: str, start: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
        """A box of a tensor, from all chunks that overlap it."""
        found = torch.empty(shape, dtype=torch.float32)
        for chunk in self.chunks[name]:
            low = tuple(map(max, chunk.start, start))
            ends = zip(chunk.start, chunk.shape, start, shape, strict=True)
            high = tuple(min(a + n, b + m) for a, n, b, m in ends)
            if all(a < b for a, b in zip(low, high, strict=True)):
                stored = self._stored(name, chunk)[_slices(low, high, chunk.start)]
                found[_slices(low, high, start)] = stored
        return found

    def _stored(self, name: str, chunk: Chunk) -> Tensor:
        """A chunk; the last one is remembered, because neighbouring boxes read it again."""
        if self._last is not None and self._last[0] is chunk:
            return self._last[1]
        path = self.path / chunk.file
        try:
            with path.open("rb") as file:
                file.seek(chunk.offset)
                tensor = torch.load(io.BytesIO(file.read(chunk.length)), map_location="cpu", weights_only=True)
        except OSError as error:
            raise RunError(f"cannot read '{path}': {error.strerror or error}") from error
        except Exception as error:  # a damaged file can raise anything
            raise _damaged(path, error) from None
        if not isinstance(tensor, Tensor) or tuple(tensor.shape) != chunk.shape or not tensor.is_floating_point():
            raise UsageError(f"'{path}' has another content for '{brief(name)}' than its index states; copy it again")
        self._last = (chunk, tensor)
        return tensor

    def _index(self) -> tuple[dict[str, list[Chunk]], dict[str, tuple[int, ...]]]:
        path = self.path / METADATA
        try:
            if path.stat().st_size > LARGEST:
                raise UsageError(f"'{path}' has more than {LARGEST} bytes; use another checkpoint")
            with path.open("rb") as file:
                found = _Unpickler(file).load()
            chunks, shapes = dict[str, list[Chunk]](), dict[str, tuple[int, ...]]()
            for name, entry in found.state_dict_metadata.items():
                if isinstance(entry, metadata.TensorStorageMetadata):
                    shapes[name], chunks[name] = tuple(entry.size), []
            for index, info in found.storage_data.items():
                if index.fqn in shapes:
                    chunks[index.fqn].append(_chunk(found.state_dict_metadata[index.fqn], index, info))
        except FileNotFoundError:
            raise UsageError(
                f"'{self.path}' has no '{METADATA}', so it is no Megatron checkpoint in the format torch_dist; name "
                f"the folder of an iteration, or of all iterations"
            ) from None
        except UsageError:
            raise
        except Exception as error:
            raise _damaged(path, error) from None
        return chunks, shapes


def _chunk(entry: Any, index: Any, info: Any) -> Chunk:
    start = tuple(index.offset or ())
    (shape,) = {tuple(chunk.sizes) for chunk in entry.chunks if tuple(chunk.offsets) == start}
    file, name = str(info.relative_path), Path(str(info.relative_path)).name
    if file != name or info.transform_descriptors:
        raise ValueError(f"it has a chunk in '{brief(file)}', or one that is transformed")
    return Chunk(start, shape, file, int(info.offset), int(info.length))


def _slices(low: tuple[int, ...], high: tuple[int, ...], origin: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(a - o, b - o) for a, b, o in zip(low, high, origin, strict=True))


def _newest(path: Path) -> Path:
    """The folder of an iteration: `path` itself, or the newest one in it."""
    latest = path / LATEST
    if not latest.is_file():
        return path
    word = latest.read_text().strip()
    return path / (f"iter_{int(word):07d}" if word.isdecimal() else word)


def _damaged(path: Path, error: Exception) -> UsageError:
    reason = " ".join(str(error).split()) or type(error).__name__
    return UsageError(f"cannot read '{path}': {brief(reason)}; copy the checkpoint again")
