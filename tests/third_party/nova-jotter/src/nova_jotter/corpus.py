"""From a file of JSON lines to packed tokens: two arrays, one a split."""

import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mplug import UsageError
from nova_jotter import END


@dataclass(frozen=True)
class Corpus:
    """The documents of both splits, each a stream of tokens in which `END` ends every document."""

    train: NDArray[np.uint8]
    validation: NDArray[np.uint8]

    def tokens(self, split: str) -> NDArray[np.uint8]:
        """The stream of a split."""
        return self.validation if split == "validation" else self.train


def pack(path: Path, field: str, validation_percent: int) -> Corpus:
    """Read a file once; UsageError names the line that holds no document."""
    train, validation = bytearray(), bytearray()
    for document in documents(path, field):
        text = document.encode()
        held_out = zlib.crc32(text) % 100 < validation_percent
        (validation if held_out else train).extend(text + bytes([END]))
    return Corpus(np.frombuffer(train, dtype=np.uint8), np.frombuffer(validation, dtype=np.uint8))


def documents(path: Path, field: str) -> Iterator[str]:
    """The documents of a file that have any text; blank lines are passed over."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                text = _document(line, field, f"{path}:{number}")
                if text:
                    yield text


def _document(line: bytes, field: str, where: str) -> str:
    try:
        record: Any = json.loads(line)
    except ValueError as error:  # not JSON, or not UTF-8
        raise UsageError(f"{where} is not JSON: {error}") from None
    if not isinstance(record, dict):
        raise UsageError(f"{where} holds a JSON {type(record).__name__}; a line is an object with a field '{field}'")
    if field not in record:
        raise UsageError(f"{where} has no field '{field}', only {', '.join(record) or 'none'}; set data.field")
    if not isinstance(record[field], str):
        raise UsageError(f"{where} has a {type(record[field]).__name__} in its field '{field}'; it must be text")
    return record[field]
