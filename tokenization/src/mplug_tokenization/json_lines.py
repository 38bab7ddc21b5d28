"""Files of JSON lines: which files a setting names, and the value of each line with its place."""

import glob
import gzip
import hashlib
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mplug import UsageError, local_path

PATTERNS = ("*.jsonl", "*.jsonl.gz")
REMEDY = "correct the line, or remove it"
PARTS = 10_000
"""Number of buckets of the hash that decides the split."""


def find_files(path: str, field: str = "data.path") -> list[Path]:
    """The sorted files of a file name, a folder or a glob; raises UsageError if there are none."""
    source = local_path(path)
    if source.is_dir():
        files = [file for pattern in PATTERNS for file in source.glob(pattern) if file.is_file()]
        reason = "contains no file *.jsonl or *.jsonl.gz"
    else:
        files = [file for file in map(Path, glob.glob(str(source), recursive=True)) if file.is_file()]
        files = [source] if source.is_file() else files
        reason = "does not exist, and matches no file as a glob"
    if not files:
        raise UsageError(f"{field} '{path}' {reason}; set {field} to a file of JSON lines, a folder or a glob")
    return sorted(files)


def read_values(files: list[Path]) -> Iterator[tuple[str, Any]]:
    """The place ('chats.jsonl:12') and the value of each line that is not empty; UsageError for one that is no JSON."""
    for file in files:
        for number, line in _lines(file):
            if line.strip():
                where = f"{file}:{number}"
                yield where, _value(line, where)


def is_held_out(value: Any, percent: float) -> bool:
    """Whether a value is for validation, by a hash of it: equal values are in the same split."""
    text = json.dumps(value, sort_keys=True).encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "big") % PARTS < percent * PARTS / 100


def _lines(file: Path) -> Iterator[tuple[int, bytes]]:
    try:
        with gzip.open(file) if file.suffix == ".gz" else file.open("rb") as lines:
            yield from enumerate(lines, start=1)
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"cannot read '{file}': {reason}; make it readable, or download it again") from None


def _value(line: bytes, where: str) -> Any:
    try:
        return json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise UsageError(f"{where} is not valid UTF-8 at byte {error.start + 1}; {REMEDY}") from None
    except json.JSONDecodeError as error:
        raise UsageError(f"{where} is not valid JSON: {error.msg} at character {error.pos + 1}; {REMEDY}") from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{where} cannot be parsed as JSON: {error}; {REMEDY}") from None
