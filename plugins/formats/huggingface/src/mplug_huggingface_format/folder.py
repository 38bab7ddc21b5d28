"""The folder of a published checkpoint: its files, and the shape and type of every tensor. Imports no torch."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from mplug import UsageError, brief, some_names
from mplug_huggingface_format.config_file import CONFIG, read_json
from mplug_saving import read_whole_header

INDEX = "model.safetensors.index.json"
WHOLE = "model.safetensors"
SUFFIX = ".safetensors"
PART = re.compile(r"model(-\d+-of-\d+)?\.safetensors")
"""The names of the files that hold a whole model, or a part of one."""
FRAMEWORKS = (None, "pt", "np", "mlx")
"""The field 'format' of a file's metadata: the libraries whose tensors have the layout of PyTorch."""
PICKLES = (".bin", ".pt", ".pth", ".ckpt")
"""Suffixes of files that run code when they are read."""


@dataclass(frozen=True)
class Stored:
    """A tensor of the folder: its file, the code of its type in the header ('BF16'), and its shape."""

    file: str
    code: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class PublicFolder:
    """What a folder says of its tensors, by the names in its files."""

    path: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, Stored]

    @property
    def quantisation(self) -> Mapping[str, Any] | None:
        """The field `quantization_config` of config.json; None if the weights are plain numbers.

        Raises UsageError for a value that is no mapping.
        """
        found = self.config.get("quantization_config")
        if found is not None and not isinstance(found, Mapping):
            raise UsageError(
                f"cannot read '{self.path}': its field 'quantization_config' is {brief(repr(found))}, but must be a "
                f"mapping, or null; use a folder with plain weights"
            )
        return found

    @cached_property
    def files(self) -> list[str]:
        """The files with tensors."""
        return sorted({stored.file for stored in self.tensors.values()})


def open_public(path: Path) -> PublicFolder:
    """Read config.json and the headers of all safetensors files. Raises UsageError for a damaged folder."""
    config, tensors = read_json(path / CONFIG), dict[str, Stored]()
    placed = _placed(path)
    for file in sorted(set(placed.values())) if placed else [WHOLE]:
        for name, (code, shape) in read_tensors(path, file).items():
            if placed and placed.get(name) != file:
                where = f"in '{placed[name]}'" if name in placed else "nowhere"
                raise UsageError(
                    f"'{path / file}' has the tensor '{brief(name)}', which '{INDEX}' has {where}; download the folder "
                    f"again"
                )
            tensors[name] = Stored(file, code, shape)
    if absent := [name for name in placed if name not in tensors]:
        raise UsageError(
            f"'{path / placed[absent[0]]}' lacks {some_names(absent)}, which '{INDEX}' has in it; download the file "
            f"again"
        )
    return PublicFolder(path, config, tensors)


def _placed(path: Path) -> dict[str, str]:
    """The file of each tensor, by the index; empty if the folder has a single file. UsageError for other folders."""
    names = sorted(os.listdir(path))
    parts = {name for name in names if PART.fullmatch(name)}
    if (path / INDEX).is_file():
        found = read_json(path / INDEX).get("weight_map")
        if not isinstance(found, dict) or not all(_is_name(file) for file in found.values()) or not found:
            raise UsageError(f"'{path / INDEX}' has no valid 'weight_map'; download the file again")
        if others := parts - {*found.values()}:
            raise UsageError(
                f"'{path}' has {some_names(others)}, which '{INDEX}' does not name, so it could hold two models; "
                f"remove the index or the files that do not belong to the model"
            )
        return found
    if (path / WHOLE).is_file():
        if others := parts - {WHOLE}:
            raise UsageError(
                f"'{path}' has '{WHOLE}' and {some_names(others)} without an index, so it could hold two models; "
                f"remove the files that do not belong to the model, or download '{INDEX}'"
            )
        return {}
    if any(name.endswith(SUFFIX) for name in names):
        raise UsageError(f"'{path}' has neither '{INDEX}' nor '{WHOLE}'; download the folder again")
    if pickles := [name for name in names if name.endswith(PICKLES)]:
        raise UsageError(
            f"'{path}' has its weights in '{brief(pickles[0])}', a pickle, which can run code when it is read; convert "
            f"it to safetensors, or download the safetensors files"
        )
    raise UsageError(f"'{path}' has a {CONFIG}, but no safetensors files; download the folder again")


def _is_name(file: Any) -> bool:
    return isinstance(file, str) and file == Path(file).name and file.endswith(SUFFIX)


def read_tensors(path: Path, file: str) -> dict[str, tuple[str, tuple[int, ...]]]:
    """The tensors of a file. The file may be a link: caches of downloads consist of links."""
    try:
        with (path / file).open("rb") as opened:
            metadata, tensors = read_whole_header(opened, file, os.fstat(opened.fileno()).st_size)
    except FileNotFoundError:
        raise UsageError(f"'{path}' lacks '{file}', which '{INDEX}' names; download the file again") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UsageError(f"cannot read '{path / file}': {reason}; download the file again") from None
    if metadata.get("format") not in FRAMEWORKS:
        raise UsageError(
            f"cannot read '{path / file}': its tensors are those of '{brief(str(metadata['format']))}', not of "
            f"PyTorch; use a folder that was saved from a model in PyTorch"
        )
    return tensors
