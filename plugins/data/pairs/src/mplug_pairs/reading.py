"""Reads pairs of texts from JSON lines, and encodes them. No torch."""

import glob
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from mplug import UsageError, local_path

REMEDY = 'write each line as {"input": "...", "target": "..."}'
PARTS = 10_000
"""Number of buckets of the hash that decides the split."""


@dataclass(frozen=True)
class Pair:
    """The texts of a line."""

    input: str
    target: str

    def held_out(self, percent: float) -> bool:
        """Whether it is for validation, by a hash of its texts: equal pairs are in the same split."""
        text = json.dumps([self.input, self.target]).encode()
        return int.from_bytes(hashlib.sha256(text).digest()[:8], "big") % PARTS < percent * PARTS / 100


class Encoded(NamedTuple):
    """The tokens of a pair, each with its end."""

    input: list[int]
    target: list[int]


def find_files(path: str, field: str) -> list[Path]:
    """The sorted files of a file name, a folder or a glob; UsageError if there are none."""
    source = local_path(path)
    found = source.glob("*.jsonl") if source.is_dir() else map(Path, glob.glob(str(source), recursive=True))
    files = [source] if source.is_file() else sorted(file for file in found if file.is_file())
    if not files:
        raise UsageError(f"{field} '{path}' names no file of JSON lines; set it to a file, a folder or a glob")
    return files


def read_pairs(files: Sequence[Path]) -> Iterator[Pair]:
    """Every pair of the files, in order; UsageError names the first line that is none."""
    for file in files:
        try:
            lines = file.read_bytes().splitlines()
        except OSError as error:
            raise UsageError(f"cannot read '{file}': {error.strerror}; make it readable") from None
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield _pair(line, f"{file}:{number}")


def _pair(line: bytes, where: str) -> Pair:
    try:
        record: Any = json.loads(line.decode("utf-8-sig"))
        json.dumps(record, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{where} is no JSON in UTF-8: {error}; {REMEDY}") from None
    found = [record.get(name) if isinstance(record, dict) else None for name in ("input", "target")]
    for name, text in zip(("input", "target"), found, strict=True):
        if not isinstance(text, str):
            raise UsageError(f"{where} has no text '{name}'; {REMEDY}")
    return Pair(*found)


@dataclass
class Count:
    """How many pairs of a split were longer than the samples."""

    pairs: int = 0
    truncated: int = 0
    dropped: int = 0


@dataclass(frozen=True)
class Encoder:
    """Encodes pairs for samples of so many tokens; longer texts are truncated before their end, or dropped."""

    encode: Callable[[str], list[int]]
    end: int
    input_length: int
    target_length: int
    drop: bool

    def of(self, pairs: Iterator[Pair], count: Count) -> Iterator[Encoded]:
        """The tokens of each pair that is kept."""
        for pair in pairs:
            count.pairs += 1
            texts = self.encode(pair.input), self.encode(pair.target)
            lengths = self.input_length - 1, self.target_length - 1
            if any(len(text) > length for text, length in zip(texts, lengths, strict=True)):
                if self.drop:
                    count.dropped += 1
                    continue
                count.truncated += 1
            yield Encoded(*([*text[:length], self.end] for text, length in zip(texts, lengths, strict=True)))
