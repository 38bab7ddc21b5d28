"""Words of a list: the longest that matches is a token, and where none does, a byte is."""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from mplug import UsageError, hookimpl

END = 256
"""Tokens below it are bytes; from the next one on they are words."""


class Words:
    """A tokenizer of a list of words."""

    def __init__(self, words: Sequence[str]) -> None:
        self.words = list(words)
        self.numbers = {word: END + 1 + number for number, word in enumerate(self.words)}
        longest_first = sorted(self.words, key=len, reverse=True)
        self.pattern = re.compile("|".join([*map(re.escape, longest_first), "(?s:.)"]))
        self.vocab_size = END + 1 + len(self.words)
        self.eod = END

    def encode(self, text: str) -> list[int]:
        """The tokens of a text."""
        tokens: list[int] = []
        for piece in self.pattern.findall(text):
            number = self.numbers.get(piece)
            tokens += piece.encode() if number is None else (number,)
        return tokens

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The tokens of each text."""
        return [self.encode(text) for text in texts]

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of tokens; ends of documents are left out, and what is not UTF-8 becomes U+FFFD."""
        return b"".join(self._bytes(token) for token in tokens).decode(errors="replace")

    def _bytes(self, token: int) -> bytes:
        if token == END:
            return b""
        return bytes([token]) if token < END else self.words[token - END - 1].encode()


class Glyph:
    """Words of a list, and bytes."""

    files = ("path",)

    class Config(BaseModel):
        """Which words."""

        model_config = ConfigDict(extra="forbid", frozen=True)

        path: str = Field(description="a text file with a word on each line")

    def __init__(self, config: Config) -> None:
        self.config = config

    @hookimpl
    def build_tokenizer(self) -> Words:
        """Read the list."""
        try:
            lines = Path(self.config.path).read_text(encoding="utf-8").splitlines()
        except (OSError, ValueError) as error:
            raise UsageError(f"path '{self.config.path}' is no list of words: {error}; name a text file") from None
        return Words([line for line in dict.fromkeys(lines) if line])
