"""From a row of a data set to a text or a conversation, and to its tokens and labels."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mplug import UsageError
from mplug_datasets.config import COLUMNS, Form
from mplug_tokenization import CorpusTokenizer
from mplug_tokenization.conversations import Count, Encoder, message_fault

PARTS = 10_000
"""Number of buckets of the hash that decides the split."""

Pair = tuple[NDArray[np.int32], NDArray[np.int64]]
"""The tokens of a document, and its labels; no labels: every next token is a target."""
Content = Mapping[str, Any]
"""The columns of a row that its form uses, without null."""


class Damaged(ValueError):
    """A row does not have its form; the message is the end of a sentence that begins with the row's place."""


@dataclass
class Tally:
    """Counts of the rows of a split."""

    rows: int = 0
    damaged: int = 0
    reason: str = ""
    """The sentence about the first damaged row."""
    empty_files: list[str] = field(default_factory=list)
    count: Count = field(default_factory=Count)

    def add(self, reason: str) -> None:
        """Count a damaged row."""
        self.damaged += 1
        self.reason = self.reason or reason

    def sentences(self) -> list[str]:
        """Warnings: what was skipped, and why."""
        found = []
        if self.damaged:
            rows = "1 damaged row was" if self.damaged == 1 else f"{self.damaged} damaged rows were"
            found.append(f"{rows} skipped of {self.rows}; the first: {self.reason}")
        if self.empty_files:
            found.append(f"files without rows: {', '.join(self.empty_files[:5])}")
        return found


@dataclass(frozen=True)
class Reading:
    """How rows are understood: the form, the names of its columns, and which rows belong to the split."""

    form: Form
    columns: Mapping[str, str]
    held_out: bool | None
    """The rows that the hash holds out (True), the others (False), or all (None)."""
    percent: float

    def content(self, row: Mapping[str, Any]) -> Content:
        """The columns that the form uses; raises Damaged if one is missing or has another type."""
        needed, optional = COLUMNS[self.form]
        named = {name: self.columns.get(name, name) for name in (*needed, *optional)}
        found = {name: row[column] for name, column in named.items() if row.get(column) is not None}
        for name in needed:
            if name not in found:
                raise Damaged(f"has no '{named[name]}'")
        if self.form == "chat":
            return {**found, "messages": _messages(found["messages"], named["messages"])}
        for name, value in found.items():
            if not isinstance(value, str):
                raise Damaged(f"has a '{named[name]}' of type {type(value).__name__}, not a text")
        if self.form == "text" and not found["text"]:
            raise Damaged(f"has an empty '{named['text']}'")
        return found

    def keeps(self, content: Content) -> bool:
        """Whether a row belongs to the split, by a hash of its columns: equal rows are in the same split."""
        if self.held_out is None:
            return True
        text = json.dumps(content, sort_keys=True, default=str).encode()
        part = int.from_bytes(hashlib.sha256(text).digest()[:8], "big") % PARTS
        return (part < self.percent * PARTS / 100) == self.held_out

    def refuse_columns(self, path: str, row: Mapping[str, Any], field_name: str) -> None:
        """Raise UsageError if the data does not have the form's columns."""
        needed, _ = COLUMNS[self.form]
        missing = [self.columns.get(name, name) for name in needed if self.columns.get(name, name) not in row]
        if missing:
            others = [form for form, (names, _) in COLUMNS.items() if all(name in row for name in names)]
            remedy = f"set data.form={others[0]}, or " if others and others[0] != self.form else "set "
            raise UsageError(
                f"{field_name} '{path}' has no column '{missing[0]}', which data.form={self.form} needs (columns: "
                f"{', '.join(row)}); {remedy}name the column in data.columns, such as "
                f"data.columns.{needed[0]}={next(iter(row), 'content')}"
            )


def _messages(found: Any, column: str) -> list[Content]:
    """The messages without null fields, which the library adds where messages have different fields."""
    if not isinstance(found, list) or not found:
        raise Damaged(f"has no list of messages in '{column}'")
    messages = []
    for number, message in enumerate(found, start=1):
        if isinstance(message, Mapping):
            message = {k: v for k, v in message.items() if v is not None or (k == "content" and _calls(message))}
        if fault := message_fault(message):
            raise Damaged(f"has a wrong message: message {number} {fault}")
        messages.append(message)
    return messages


def _calls(message: Mapping[str, Any]) -> bool:
    return bool(message.get("tool_calls"))


def messages_of(form: Form, content: Content) -> list[Content]:
    """The conversation of a row: for instructions, a question and an answer, after the system's message if any."""
    if form == "chat":
        return list(content["messages"])
    if form == "prompt":
        question, answer = content["prompt"], content["completion"]
    else:
        given = content.get("input")
        question, answer = content["instruction"] + (f"\n\n{given}" if given else ""), content["output"]
    system = [{"role": "system", "content": content["system"]}] if content.get("system") else []
    return [*system, {"role": "user", "content": question}, {"role": "assistant", "content": answer}]


@dataclass(frozen=True)
class TextEncoder:
    """Encodes texts; the end of each is the tokenizer's token for it, if it has one."""

    tokenizer: CorpusTokenizer

    def encode(self, contents: Sequence[Content], count: Count) -> list[Pair | str | None]:
        """The tokens of each text, or the fault of a text that cannot be encoded."""
        texts = [content["text"] for content in contents]
        faults = [_surrogate(text) for text in texts]
        end = [] if self.tokenizer.eod is None else [self.tokenizer.eod]
        tokens = iter(self.tokenizer.encode_batch([t for t, fault in zip(texts, faults, strict=True) if not fault]))
        count.conversations += len(texts)
        return [
            fault
            or (np.concatenate([np.asarray(next(tokens), np.int32), np.asarray(end, np.int32)]), np.empty(0, np.int64))
            for fault in faults
        ]


@dataclass(frozen=True)
class ConversationEncoder:
    """Encodes conversations by the template; only answers are targets."""

    form: Form
    encoder: Encoder

    def encode(self, contents: Sequence[Content], count: Count) -> list[Pair | str | None]:
        """Tokens and labels of each conversation; None if it is omitted; or the fault of one that cannot be encoded."""
        return [self._encode(content, count) for content in contents]

    def _encode(self, content: Content, count: Count) -> Pair | str | None:

        from mplug_tokenization.packed_samples import document  # imports torch, and checking data must not

        try:
            found = self.encoder.encode(messages_of(self.form, content), content.get("tools"), count)
        except UnicodeEncodeError:
            count.conversations -= 1
            return "has an unpaired surrogate in a text"
        except ValueError as error:
            count.conversations -= 1
            return f"has a conversation that cannot be rendered: {error}"
        return document(found, self.encoder.length) if found is not None else None


def _surrogate(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        return "has an unpaired surrogate in a text"
    return ""
