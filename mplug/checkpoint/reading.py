"""Files of a checkpoint as they are read: plain files of its folder, strict JSON, headers of safetensors. Torch-free.

A checkpoint may come from anywhere. Each function raises ValueError with a reason ("'x' is a link") where the content
is not acceptable, and OSError where the file system fails.
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

from mplug.dtypes import FORMATS

LARGEST_HEADER = 100_000_000
"""Bytes of a safetensors header, as its library limits them."""
LARGEST_MANIFEST = 1 << 30
"""Bytes of a manifest: ten million chunks have about as many."""
MOST_DIMS = 64
LARGEST = 10**18
"""The largest count, dimension or size: sums of a few stay in 64 bits."""
CODES = {kind.code: kind for kind in FORMATS.values()}
Expected = Mapping[str, tuple[str, Sequence[int]]]
"""Name of a tensor in a file -> its dtype's name and its shape."""


class Replaced(ValueError):
    """A file that was another one when it was opened than a moment before."""


def status_of(folder: Path, name: str) -> os.stat_result:
    """The status of a plain file of a folder."""
    try:
        status = os.lstat(folder / name)
    except (FileNotFoundError, NotADirectoryError):
        raise ValueError(f"'{name}' is missing") from None
    if stat.S_ISLNK(status.st_mode):
        raise ValueError(f"'{name}' is a link")
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f"'{name}' is not a plain file")
    return status


def open_file(folder: Path, name: str) -> BinaryIO:
    """A plain file of a folder, opened to read. Links are not followed, and no pipe or device is waited for."""
    before = status_of(folder, name)  # before it is opened, which alone may have an effect on a device
    descriptor = os.open(folder / name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    file = os.fdopen(descriptor, "rb")
    status = os.fstat(descriptor)
    if (status.st_dev, status.st_ino) != (before.st_dev, before.st_ino):
        file.close()
        raise Replaced(f"'{name}' was replaced while it was opened")
    return file


def read_small(folder: Path, name: str) -> bytes:
    """The bytes of a manifest."""
    with open_file(folder, name) as file:
        found = file.read(LARGEST_MANIFEST + 1)
    if len(found) > LARGEST_MANIFEST:
        raise ValueError(f"'{name}' has more than {LARGEST_MANIFEST} bytes")
    return found


def parse_json(data: bytes, name: str) -> Any:
    """The value of a JSON text; ValueError also for two equal keys of one mapping and for nesting without end."""
    try:
        return json.loads(data.decode("utf-8"), object_pairs_hook=_unique)
    except RecursionError:
        raise ValueError(f"'{name}' is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"'{name}' is not valid JSON: {error}") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"it has the key {key!r} twice")
        found[key] = value
    return found


def check_file(folder: Path, name: str, crc32: int, tensors: Expected) -> None:
    """Read a file whole: it must have this checksum, and a header that describes at least these tensors."""
    with open_file(folder, name) as file:
        size = os.fstat(file.fileno()).st_size
        if checksum_of(file) != crc32:
            raise ValueError(f"'{name}' is not what was saved")
        file.seek(0)
        found = _header(file, name, size)
    _compare(found, name, tensors)


def check_header(folder: Path, name: str, tensors: Expected) -> None:
    """Read the header of a file: it must describe at least these tensors."""
    with open_file(folder, name) as file:
        found = _header(file, name, os.fstat(file.fileno()).st_size)
    _compare(found, name, tensors)


def _compare(found: Mapping[str, tuple[str, tuple[int, ...]]], name: str, tensors: Expected) -> None:
    for tensor, (dtype, shape) in tensors.items():
        if tensor not in found:
            raise ValueError(f"'{name}' has no tensor '{tensor}'")
        if found[tensor] != (FORMATS[dtype].code, tuple(shape)):
            code, other = found[tensor]
            raise ValueError(
                f"'{name}' holds '{tensor}' as {code} of shape {other}, and the manifest says "
                f"{FORMATS[dtype].code} of shape {tuple(shape)}"
            )


def checksum_of(file: BinaryIO) -> int:
    """The CRC-32 of what is left of a file."""
    checksum = 0
    while block := file.read(1 << 22):
        checksum = zlib.crc32(block, checksum)
    return checksum


def _header(file: BinaryIO, name: str, size: int) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Code and shape of every tensor of a safetensors file, whose data must fill the file without a gap."""
    length = int.from_bytes(file.read(8), "little")
    if length > min(LARGEST_HEADER, size - 8):
        raise ValueError(f"the header of '{name}' does not fit into the file")
    header = parse_json(file.read(length), f"{name}: header")
    if not isinstance(header, dict):
        raise ValueError(f"the header of '{name}' is not a mapping")
    header.pop("__metadata__", None)
    found, spans = {}, [(0, 0)]
    for tensor, entry in header.items():
        match entry:
            case {"dtype": str(code), "shape": [*shape], "data_offsets": [int(low), int(high)]} if code in CODES:
                is_shape = len(shape) <= MOST_DIMS and all(type(n) is int and 0 <= n <= LARGEST for n in shape)
                if not is_shape or high - low != prod(shape) * CODES[code].bytes:
                    raise ValueError(f"the header of '{name}' gives '{tensor}' a shape that is not that of its bytes")
                found[tensor] = (code, tuple(shape))
                spans.append((low, high))
            case _:
                raise ValueError(f"the header of '{name}' does not describe '{tensor}' by dtype, shape and offsets")
    spans.sort()
    if any(high != low for (_, high), (low, _) in pairwise(spans)) or spans[-1][1] != size - 8 - length:
        raise ValueError(f"the tensors of '{name}' overlap, or leave gaps, or reach beyond the file")
    return found
