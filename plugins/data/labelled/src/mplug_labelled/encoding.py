"""Lines as tokens and labels."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mplug import IGNORED, UsageError, listed
from mplug_labelled.lines import REMEDY, Line

Document = tuple[list[int], list[int]]
"""Tokens, and the label at each of them."""


@dataclass(frozen=True)
class Encoder:
    """Encodes lines of a form: each becomes one document, or two (a pair).

    `names` are those of the classes. `begin` and `end` are tokens around every text, or None. The class of a text is at
    its first position, or at its last one (`at_end`).
    """

    form: str
    tokenizer: Any
    names: Sequence[str]
    begin: int | None
    end: int | None
    length: int
    at_end: bool = False

    def encode(self, line: Line) -> list[Document]:
        """The documents of a line, which together have at most `length` tokens. UsageError for an unknown label."""
        if self.form == "pairs":
            half = self.length // 2
            anchor, positive = (
                self._around(self._tokens(text, line.where), half) for text in (line.first, line.second)
            )
            return [(anchor, [0, *[IGNORED] * (len(anchor) - 1)]), (positive, [IGNORED] * len(positive))]
        if self.form == "texts":
            tokens = self._around(self._tokens(line.first, line.where), self.length)
            label, others = [self._number(line.second, line.where)], [IGNORED] * (len(tokens) - 1)
            return [(tokens, [*others, *label] if self.at_end else [*label, *others])]
        return [self._words(line)]

    def _words(self, line: Line) -> Document:
        tokens, labels = list[int](), list[int]()
        for place, (word, label) in enumerate(zip(line.first, line.second, strict=True)):
            pieces = self._tokens(word if place == 0 else f" {word}", line.where)
            number = IGNORED if label is None else self._number(label, line.where)
            labels += [number, *[IGNORED] * (len(pieces) - 1)][: len(pieces)]
            tokens += pieces
        front = int(self.begin is not None)
        around = self._around(tokens, self.length)
        kept = len(around) - front - int(self.end is not None)
        return around, [*[IGNORED] * front, *labels[:kept], *[IGNORED] * int(self.end is not None)]

    def _around(self, tokens: list[int], most: int) -> list[int]:
        """The tokens between the special ones, truncated to `most` in total."""
        front = [] if self.begin is None else [self.begin]
        back = [] if self.end is None else [self.end]
        return [*front, *tokens[: most - len(front) - len(back)], *back]

    def _tokens(self, text: str, where: str) -> list[int]:
        try:
            found = [int(token) for token in self.tokenizer.encode(text)]
        except UnicodeEncodeError:
            raise UsageError(f"{where} has an unpaired surrogate in a text; {REMEDY}") from None
        if not found and self.begin is None:
            raise UsageError(f"{where} has a text without tokens; {REMEDY}")
        return found

    def _number(self, label: Any, where: str) -> int:
        if isinstance(label, str) and label in self.names:
            return self.names.index(label)
        if isinstance(label, int) and not isinstance(label, bool) and 0 <= label < len(self.names):
            return label
        raise UsageError(
            f"{where}: the label {label!r} is none of the classes of the run ({listed(self.names[:8])}"
            f"{', ...' if len(self.names) > 8 else ''}); {REMEDY}, or add it to model.labels "
            f"(objectives.classify.labels)"
        )
