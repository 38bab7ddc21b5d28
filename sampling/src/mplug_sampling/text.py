"""The text that follows a prompt, token by token: whole characters, end tokens, stop words."""

from collections.abc import Collection, Iterable, Sequence
from typing import Protocol

INCOMPLETE = "\ufffd"
"""The last character of a text whose last bytes are the beginning of a character."""
LENGTH = "length"
"""Why a text ended if no token and no word ended it."""


class Decodes(Protocol):
    """Any tokenizer, as far as texts need it."""

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of tokens."""


class Text:
    """The text that follows a prompt. It ends before an end token or a stop word, which are not part of it."""

    def __init__(
        self, tokenizer: Decodes, prompt: Sequence[int], ends: Collection[int], stops: Sequence[str] = ()
    ) -> None:
        self.tokenizer, self.ends, self.stops = tokenizer, ends, stops
        self.text, self.ended, self.num_tokens = "", LENGTH, 0
        self._tokens = list(prompt)
        self._begin, self._read = 0, len(prompt)  # tokens before `_begin` are no longer decoded
        self._shown = 0

    def take(self, token: int) -> bool:
        """Add the next token; returns whether the text ends with it."""
        if token in self.ends:
            self.ended = "end"
            return True
        self.num_tokens += 1
        self._tokens.append(token)
        new = self._undecoded()
        if new and not new.endswith(INCOMPLETE):
            self._begin, self._read = self._read, len(self._tokens)
            return self._append(new)
        return False

    def finish(self) -> None:
        """No token follows: the bytes of an incomplete character become U+FFFD."""
        if self.ended != "stop":
            self._append(self._undecoded())

    def shown(self, *, is_last: bool = False) -> str:
        """The part of the text that is certain and was not returned before.

        The beginning of a stop word is not certain until the next tokens come, or until the text ends (`is_last`).
        """
        certain = len(self.text) if is_last or self.ended != LENGTH else len(self.text) - self._held_back()
        part = self.text[self._shown : certain]
        self._shown = max(self._shown, certain)
        return part

    def _undecoded(self) -> str:
        """The text of the tokens that have none yet; decoded with the tokens before them, which may change it."""
        before = self.tokenizer.decode(self._tokens[self._begin : self._read])
        return self.tokenizer.decode(self._tokens[self._begin :])[len(before) :]

    def _append(self, new: str) -> bool:
        longest = max(map(len, self.stops), default=0)
        first = max(0, len(self.text) - longest + 1)
        self.text += new
        found = [at for at in (self.text.find(stop, first) for stop in self.stops) if at >= 0]
        if found:
            self.text, self.ended = self.text[: min(found)], "stop"
        return bool(found)

    def _held_back(self) -> int:
        """Number of last characters that may be the beginning of a stop word. Shown ones are not: they were certain."""
        longest = max(map(len, self.stops), default=1) - 1
        for length in range(min(longest, len(self.text) - self._shown), 0, -1):
            end = self.text[-length:]
            if any(stop.startswith(end) for stop in self.stops if len(stop) > length):
                return length
        return 0
