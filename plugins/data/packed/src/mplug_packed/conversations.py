"""Reads conversations from JSON lines: one JSON object with `messages` per line."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mplug import UsageError
from mplug_tokenization.conversations import message_fault
from mplug_tokenization.json_lines import find_files, is_held_out, read_values


@dataclass(frozen=True)
class Conversation:
    """The messages of a line, and its location ('chats.jsonl:12')."""

    where: str
    messages: list[dict[str, Any]]
    tools: Any

    def held_out(self, percent: float) -> bool:
        """Whether it is for validation, by a hash of its messages: equal conversations are in the same split."""
        return is_held_out(self.messages, percent)


def check_files(path: str, field: str) -> None:
    """Read the first conversation of each file of `field`; UsageError if one is wrong or if there is none at all."""
    first = [next(read_conversations([file]), None) for file in find_files(path, field)]
    if not any(first):
        raise UsageError(f"{field} '{path}' has no conversation; set {field} to files with conversations")


def read_conversations(files: list[Path]) -> Iterator[Conversation]:
    """Every conversation of the files, in order; UsageError names the first line without a valid conversation."""
    for where, record in read_values(files):
        yield _conversation(record, where)


def _conversation(record: Any, where: str) -> Conversation:
    messages = record.get("messages") if isinstance(record, dict) else None
    if not isinstance(messages, list):
        kind = f"fields: {', '.join(record) or 'none'}" if isinstance(record, dict) else type(record).__name__
        raise UsageError(f"{where} has no list 'messages' ({kind}); write each line as {{\"messages\": [...]}}")
    for number, message in enumerate(messages, start=1):
        if fault := message_fault(message):
            raise UsageError(f"{where}, message {number}, {fault}")
    return Conversation(where, messages, record.get("tools"))
