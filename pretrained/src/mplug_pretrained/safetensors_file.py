"""Write a safetensors file tensor by tensor: at most one of its tensors is in memory."""

import json
from collections.abc import Callable, Iterable, Iterator
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mplug.precisions.dtypes import FORMATS
from mplug.system.files import sync_file

Shape = tuple[int, ...]


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
