"""Read the files of a checkpoint: regular files only, strict JSON, checked safetensors headers. Imports no torch.

A checkpoint may come from an untrusted source. Each function raises ValueError with a reason ("'x' is a link") if the
content is not acceptable, and OSError if the file system fails.
"""

import json
import os
import stat
import zlib
from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

from mplug.precisions.dtypes import FORMATS

LARGEST_HEADER = 100_000_000
"""Maximum size of a safetensors header in bytes; the library has the same limit."""
LARGEST_MANIFEST = 1 << 30
"""Maximum size of a manifest in bytes: about ten million chunks."""
MOST_DIMS = 64
LARGEST = 10**18
"""The largest count, dimension or size. The sum of a few such numbers fits into 64 bits."""
CODES = {kind.code: kind for kind in FORMATS.values()}
Expected = Mapping[str, tuple[str, Sequence[int]]]
"""The name of a tensor in a file -> the name of its dtype, and its shape."""


class Replaced(ValueError):
    """A file that was another one when it was opened than a moment before."""


def status_of(folder: Path, name: str) -> os.stat_result:
    """The status of a regular file in a folder. ValueError if it is missing, a link, or not a regular file."""
    try:
        status = os.lstat(folder / name)
    except (FileNotFoundError, NotADirectoryError):
        raise ValueError(f"'{name}' is missing") from None
    if stat.S_ISLNK(status.st_mode):
        raise ValueError(f"'{name}' is a link")
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f"'{name}' is not a regular file")
    return status


def open_file(folder: Path, name: str) -> BinaryIO:
    """Open a regular file in a folder to read. The function follows no link, and waits for no pipe or device."""
    before = status_of(folder, name)  # before the file is opened, because opening a device can have effects
    descriptor = os.open(folder / name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    file = os.fdopen(descriptor, "rb")
    status = os.fstat(descriptor)
    if (status.st_dev, status.st_ino) != (before.st_dev, before.st_ino):
        file.close()
        raise Replaced(f"'{name}' was replaced while it was opened")
    return file


def read_small(folder: Path, name: str) -> bytes:
    """The bytes of a manifest. ValueError if it has more than `LARGEST_MANIFEST` bytes."""
    with open_file(folder, name) as file:
        content = file.read(LARGEST_MANIFEST + 1)
    if len(content) > LARGEST_MANIFEST:
        raise ValueError(f"'{name}' has more than {LARGEST_MANIFEST} bytes")
    return content


def parse_json(data: bytes, name: str) -> Any:
    """The value of a JSON text. ValueError also if a mapping has a key twice, or if the nesting is too deep."""
    try:
        return json.loads(data.decode("utf-8"), object_pairs_hook=_unique)
    except RecursionError:
        raise ValueError(f"'{name}' is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"'{name}' is not valid JSON: {error}") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping: dict[str, Any] = {}
    for key, value in pairs:
        if key in mapping:
            raise ValueError(f"it has the key {key!r} twice")
        mapping[key] = value
    return mapping


def check_file(folder: Path, name: str, crc32: int, tensors: Expected) -> None:
    """Read a file completely. ValueError unless it has this checksum, and its header describes these tensors."""
    with open_file(folder, name) as file:
        size = os.fstat(file.fileno()).st_size
        if checksum_of(file) != crc32:
            raise ValueError(f"'{name}' has changed since it was saved")
        file.seek(0)
        header = read_header(file, name, size)
    _compare(header, name, tensors)


def check_header(folder: Path, name: str, tensors: Expected) -> None:
    """Read the header of a file. ValueError unless it describes these tensors; it may describe others."""
    with open_file(folder, name) as file:
        header = read_header(file, name, os.fstat(file.fileno()).st_size)
    _compare(header, name, tensors)


def _compare(header: Mapping[str, tuple[str, tuple[int, ...]]], name: str, tensors: Expected) -> None:
    for tensor, (dtype, shape) in tensors.items():
        if tensor not in header:
            raise ValueError(f"'{name}' has no tensor '{tensor}'")
        if header[tensor] != (FORMATS[dtype].code, tuple(shape)):
            code, actual = header[tensor]
            raise ValueError(
                f"'{name}' has '{tensor}' as {code} of shape {actual}, but the manifest states "
                f"{FORMATS[dtype].code} of shape {tuple(shape)}"
            )


def checksum_of(file: BinaryIO) -> int:
    """The CRC-32 of a file, from the current position to the end."""
    checksum = 0
    while block := file.read(1 << 22):
        checksum = zlib.crc32(block, checksum)
    return checksum


def read_header(file: BinaryIO, name: str, size: int) -> dict[str, tuple[str, tuple[int, ...]]]:
    """The dtype code and shape of every tensor in a safetensors file. The data must fill the file without a gap."""
    return read_whole_header(file, name, size)[1]


def read_whole_header(
    file: BinaryIO, name: str, size: int
) -> tuple[Mapping[str, Any], dict[str, tuple[str, tuple[int, ...]]]]:
    """(the metadata of a safetensors file, the dtype code and shape of every tensor as `read_header` returns them)."""
    length = int.from_bytes(file.read(8), "little")
    if length > min(LARGEST_HEADER, size - 8):
        raise ValueError(f"the header of '{name}' does not fit into the file")
    header = parse_json(file.read(length), f"{name}: header")
    if not isinstance(header, dict):
        raise ValueError(f"the header of '{name}' is not a mapping")
    metadata = header.pop("__metadata__", None)
    tensors, spans = {}, [(0, 0)]
    for tensor, entry in header.items():
        match entry:
            case {"dtype": str(code), "shape": [*shape], "data_offsets": [int(low), int(high)]} if code in CODES:
                is_shape = len(shape) <= MOST_DIMS and all(type(n) is int and 0 <= n <= LARGEST for n in shape)
                if not is_shape or high - low != prod(shape) * CODES[code].bytes:
                    raise ValueError(
                        f"in the header of '{name}', the shape of '{tensor}' does not match its number of bytes"
                    )
                tensors[tensor] = (code, tuple(shape))
                spans.append((low, high))
            case _:
                raise ValueError(f"the header of '{name}' does not describe '{tensor}' by dtype, shape and offsets")
    spans.sort()
    if any(high != low for (_, high), (low, _) in pairwise(spans)) or spans[-1][1] != size - 8 - length:
        raise ValueError(f"the tensors of '{name}' overlap, leave gaps, or exceed the file")
    return metadata if isinstance(metadata, Mapping) else {}, tensors
