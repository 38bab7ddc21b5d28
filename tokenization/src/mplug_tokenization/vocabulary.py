"""Encodes text that contains special tokens, and maps parts of the text to their tokens."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, takewhile

from mplug_tokenization.contract import CorpusTokenizer


@dataclass(frozen=True)
class Encoded:
    """The tokens of a conversation, and for each token whether it belongs to an answer."""

    tokens: list[int]
    answers: list[bool]


class Vocabulary:
    """A tokenizer extended by special tokens, at which texts are split.

    A special token of the tokenizer (its attribute `special_tokens`, text to number, if it exists) keeps its number.
    The others are numbered in order, from the tokenizer's `vocab_size` on. `places` are texts whose numbers the caller
    chooses, because it replaces these tokens by others.
    """

    def __init__(
        self, tokenizer: CorpusTokenizer, special: Sequence[str], places: Mapping[str, int] | None = None
    ) -> None:
        existing: Mapping[str, int] = getattr(tokenizer, "special_tokens", {})
        first = tokenizer.vocab_size
        added = [text for text in dict.fromkeys(special) if text not in existing]
        self.tokenizer = tokenizer
        self.special = {**existing, **{text: first + number for number, text in enumerate(added)}, **(places or {})}
        self.vocab_size = max([first, *(token + 1 for token in self.special.values())])
        self.texts = {token: text for text, token in self.special.items()}
        longest_first = sorted(self.special, key=len, reverse=True)
        self._split = re.compile(f"({'|'.join(map(re.escape, longest_first))})") if longest_first else None

    def encode(self, text: str) -> list[int]:
        """The tokens of a text; the text of a special token becomes that token."""
        return self.encode_answers(text, ()).tokens

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of tokens, including the texts of special tokens."""
        runs = groupby(tokens, key=lambda token: token in self.texts)
        return "".join(
            "".join(self.texts[token] for token in run) if special else self.tokenizer.decode(run)
            for special, run in runs
        )

    def has_special(self, text: str) -> bool:
        """Whether a text contains the text of a special token."""
        return self._split is not None and self._split.search(text) is not None

    def encode_answers(self, text: str, answers: Sequence[tuple[int, int]]) -> Encoded:
        """The tokens of a text with answers at (begin, end) in characters, in order.

        A token across the border of an answer belongs to the answer.
        """
        tokens: list[int] = []
        borders = [(place, ends) for begin, end in answers for place, ends in ((begin, False), (end, True))]
        at: list[int] = []
        start = 0
        for piece in self._split.split(text) if self._split else (text,):
            within = list[tuple[int, bool]]()
            while len(at) + len(within) < len(borders) and borders[len(at) + len(within)][0] < start + len(piece):
                place, ends = borders[len(at) + len(within)]
                within.append((place - start, ends))
            inside = [self.special[piece]] if piece in self.special else list(self.tokenizer.encode(piece))
            at += [len(tokens) + self._tokens_before(piece, inside, place, ends) for place, ends in within]
            tokens += inside
            start += len(piece)
        at += [len(tokens)] * (len(borders) - len(at))
        marks = [False] * len(tokens)
        for begin, end in zip(at[::2], at[1::2], strict=True):
            marks[begin:end] = [True] * (end - begin)
        return Encoded(tokens, marks)

    def _tokens_before(self, piece: str, tokens: list[int], place: int, ends: bool) -> int:
        """The number of tokens before a border of an answer; a token across the border belongs to the answer."""
        alone = self.tokenizer.encode(piece[:place]) if place else []
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(alone, tokens, strict=False)))
        return same + 1 if ends and same < len(alone) else same


class TextVocabulary(Vocabulary):
    """The tokenizer of plain texts, which end with its end of text: they are no conversations."""

    @property
    def end_tokens(self) -> frozenset[int]:
        """The token that ends a text; empty if the tokenizer has none."""
        end = self.tokenizer.eod
        return frozenset() if end is None else frozenset({end})
