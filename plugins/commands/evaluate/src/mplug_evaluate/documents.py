"""The documents of files, as tokens."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mplug import UsageError

if TYPE_CHECKING:
    from mplug import Run
    from mplug_tokenization import FolderTokenizer

INCOMPLETE = "\ufffd"
"""What a tokenizer decodes from bytes that are only a part of a character."""


@dataclass(frozen=True)
class Documents:
    """The documents of a file: for each, the tokens that the model reads, of which it predicts all but the first.

    `num_bytes` is the number of bytes, in UTF-8, of the texts that are predicted; None if it is unknown.
    """

    path: Path
    tokens: tuple[Sequence[int], ...]
    num_bytes: int | None

    @cached_property
    def num_targets(self) -> int:
        """The number of tokens that are predicted."""
        return sum(max(len(one) - 1, 0) for one in self.tokens)


@dataclass(frozen=True)
class Start:
    """The tokens of a document, with the token in front of it if there is one: `added` such tokens stand in front."""

    encode: Callable[[str], list[int]]
    decode: Callable[[list[int]], str]
    added: int

    @staticmethod
    def of_run(run: "Run", directory: Path) -> "Start":
        """By the tokenizer of a run's data: the token that ends the document before stands in front of a document."""
        tokenizer: Any = run.hooks.call.build_tokenizer(run=run)
        if tokenizer is None:
            raise UsageError(
                f"the data plugin of run '{directory}' has no tokenizer to read files; use another run with --name, or "
                f"evaluate the run's own data, without files"
            )
        front = [eod] if (eod := getattr(tokenizer, "eod", None)) is not None else []
        return Start(lambda text: [*front, *tokenizer.encode(text)], tokenizer.decode, len(front))

    @staticmethod
    def of_folder(tokenizer: "FolderTokenizer") -> "Start":
        """By the tokenizer of a published folder, which adds the special tokens of a text itself."""
        return Start(tokenizer.encode_prompt, tokenizer.decode, len(tokenizer.encode_prompt("")))

    def document(self, text: str) -> tuple[list[int], int | None]:
        """(the tokens of a text, the number of bytes of what is predicted of it).

        The number is None if the first token is not predicted and is only a part of a character.
        """
        tokens, size = self.encode(text), len(text.encode())
        first = "" if self.added else self.decode(tokens[:1])
        return tokens, None if INCOMPLETE in first else size - len(first.encode())


def read_documents(path: Path, start: Start) -> Documents:
    """The documents of a file: the lines of JSON lines, or the whole text. UsageError if nothing can be predicted."""
    found = [start.document(text) for text in _texts(path)]
    sizes = [size for _, size in found]
    num_bytes = None if None in sizes else sum(size or 0 for size in sizes)
    documents = Documents(path, tuple(tokens for tokens, _ in found), num_bytes)
    if not documents.num_targets:
        raise UsageError(
            f"'{path}' has no token that follows another one, so there is nothing to predict; use more text"
        )
    return documents


def _texts(path: Path) -> list[str]:
    try:
        text = path.read_bytes().decode()
    except OSError as error:
        raise UsageError(f"cannot read '{path}': {error.strerror}; make it readable") from None
    except UnicodeDecodeError as error:
        raise UsageError(
            f"'{path}' is no text in UTF-8 (byte {error.start}); convert it, or read it with a loader: --data"
        ) from None
    if path.suffix != ".jsonl":
        return [text]
    lines = text.removesuffix("\n").split("\n")
    return [_of_line(line, f"'{path}', line {number}") for number, line in enumerate(lines, 1)]


def _of_line(line: str, where: str) -> str:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{where} is no JSON: {error}; a line is an object with the field 'text'") from None
    text = value.get("text") if isinstance(value, dict) else None
    if not isinstance(text, str):
        if isinstance(value, dict) and "messages" in value:
            raise UsageError(
                f"{where} is a conversation, and no document with the field 'text'; evaluate conversations with the "
                f"loader of the run: without FILE, or with --data NAME --set data.path=FILE"
            )
        raise UsageError(f"{where} has no text in the field 'text'; every line needs one")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UsageError(f"{where} has half a character; write the whole character") from None
    return text
