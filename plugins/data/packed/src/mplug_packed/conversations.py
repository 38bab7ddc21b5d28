"""Reads conversations from JSON lines: one JSON object with `messages` per line."""

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
from mplug_tokenization.conversations import message_fault

PATTERNS = ("*.jsonl", "*.jsonl.gz")
REMEDY = "correct the line, or remove it"
PARTS = 10_000
"""Number of buckets of the hash that decides the split."""


@dataclass(frozen=True)
class Conversation:
    """The messages of a line, and its location ('chats.jsonl:12')."""

    where: str
    messages: list[dict[str, Any]]
    tools: Any

    def held_out(self, percent: float) -> bool:
        """Whether it is for validation, by a hash of its messages: equal conversations are in the same split."""
        text = json.dumps(self.messages, sort_keys=True).encode()
        return int.from_bytes(hashlib.sha256(text).digest()[:8], "big") % PARTS < percent * PARTS / 100


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


def check_files(path: str, field: str) -> None:
    """Read the first conversation of each file of `field`; UsageError if one is wrong or if there is none at all."""
    first = [next(read_conversations([file]), None) for file in find_files(path, field)]
    if not any(first):
        raise UsageError(f"{field} '{path}' has no conversation; set {field} to files with conversations")


def read_conversations(files: list[Path]) -> Iterator[Conversation]:
    """Every conversation of the files, in order; UsageError names the first line without a valid conversation."""
    for file in files:
        for number, line in _lines(file):
            if line.strip():
                yield _conversation(line, f"{file}:{number}")


def _lines(file: Path) -> Iterator[tuple[int, bytes]]:
    try:
        with gzip.open(file) if file.suffix == ".gz" else file.open("rb") as lines:
            yield from enumerate(lines, start=1)
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"cannot read '{file}': {reason}; make it readable, or download it again") from None


def _conversation(line: bytes, where: str) -> Conversation:
    try:
        record: Any = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise UsageError(f"{where} is not valid UTF-8 at byte {error.start + 1}; {REMEDY}") from None
    except json.JSONDecodeError as error:
        raise UsageError(f"{where} is not valid JSON: {error.msg} at character {error.pos + 1}; {REMEDY}") from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{where} cannot be parsed as JSON: {error}; {REMEDY}") from None
    messages = record.get("messages") if isinstance(record, dict) else None
    if not isinstance(messages, list):
        kind = f"fields: {', '.join(record) or 'none'}" if isinstance(record, dict) else type(record).__name__
        raise UsageError(f"{where} has no list 'messages' ({kind}); write each line as {{\"messages\": [...]}}")
    for number, message in enumerate(messages, start=1):
        if fault := message_fault(message):
            raise UsageError(f"{where}, message {number}, {fault}")
    return Conversation(where, messages, record.get("tools"))
