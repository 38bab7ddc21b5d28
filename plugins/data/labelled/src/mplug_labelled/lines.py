"""Reads JSON lines with texts and labels."""

import glob
import gzip
import hashlib
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mplug import UsageError, local_path

PATTERNS = ("*.jsonl", "*.jsonl.gz")
REMEDY = "correct the line, or remove it"
PARTS = 10_000
"""Number of buckets of the hash that decides the split."""
FIELDS = {"texts": ("text", "label"), "words": ("words", "labels"), "pairs": ("anchor", "positive")}
"""Form -> the fields that a line must have; others are not read."""


@dataclass(frozen=True)
class Line:
    """The two fields of a line, and its location ('mails.jsonl:12')."""

    where: str
    first: Any
    second: Any

    def held_out(self, percent: float) -> bool:
        """Whether it is for validation, by a hash of its text: equal texts are in the same split."""
        text = json.dumps(self.first).encode()
        return int.from_bytes(hashlib.sha256(text).digest()[:8], "big") % PARTS < percent * PARTS / 100


def find_files(path: str, field: str = "data.path") -> list[Path]:
    """The sorted files of a file name, a folder or a glob; raises UsageError if there are none."""
    source = local_path(path)
    if source.is_dir():
        files = [file for pattern in PATTERNS for file in source.glob(pattern) if file.is_file()]
    else:
        files = [file for file in map(Path, glob.glob(str(source), recursive=True)) if file.is_file()]
        files = [source] if source.is_file() else files
    if not files:
        raise UsageError(f"{field} '{path}' names no file *.jsonl or *.jsonl.gz; set it to a file, a folder or a glob")
    return sorted(files)


def check_files(path: str, field: str, form: str) -> None:
    """Read the first line of each file of `field`; UsageError if one is wrong, or if there is none at all."""
    first = [next(read_lines([file], form), None) for file in find_files(path, field)]
    if not any(first):
        raise UsageError(f"{field} '{path}' has no line; set {field} to files with lines")


def of_split(split: str, path: str, validation_path: str | None, percent: float, form: str) -> Iterator[Line]:
    """The lines of a split, in the order of the files."""
    if validation_path is not None:
        yield from read_lines(find_files(validation_path if split == "validation" else path), form)
        return
    for line in read_lines(find_files(path), form):
        if line.held_out(percent) == (split == "validation"):
            yield line


def read_lines(files: list[Path], form: str) -> Iterator[Line]:
    """Every line of the files, in order; UsageError names the first that has not the form."""
    for file in files:
        try:
            with gzip.open(file) if file.suffix == ".gz" else file.open("rb") as lines:
                for number, line in enumerate(lines, start=1):
                    if line.strip():
                        yield _line(line, f"{file}:{number}", form)
        except (OSError, EOFError, zlib.error) as error:
            reason = getattr(error, "strerror", None) or error
            raise UsageError(f"cannot read '{file}': {reason}; make it readable, or download it again") from None


def _line(line: bytes, where: str, form: str) -> Line:
    try:
        record: Any = json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{where} is not valid JSON in UTF-8: {error}; {REMEDY}") from None
    names = FIELDS[form]
    if not isinstance(record, dict) or any(name not in record for name in names):
        has = f"fields: {', '.join(record) or 'none'}" if isinstance(record, dict) else type(record).__name__
        raise UsageError(f"{where} lacks '{names[0]}' or '{names[1]}' ({has}), which data.form={form} needs; {REMEDY}")
    first, second = (record[name] for name in names)
    if form == "words":
        is_right = isinstance(first, list) and isinstance(second, list) and len(first) == len(second) > 0
        if not is_right or not all(isinstance(word, str) and word for word in first):
            raise UsageError(
                f"{where}: 'words' and 'labels' must be lists of equal length, of texts and labels; {REMEDY}"
            )
    elif not isinstance(first, str) or not first or (form == "pairs" and (not isinstance(second, str) or not second)):
        raise UsageError(f"{where}: '{names[0]}' must be a text that is not empty; {REMEDY}")
    return Line(where, first, second)
