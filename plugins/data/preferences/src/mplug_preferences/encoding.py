"""Encodes pairs of answers: the tokens of both, each after the prompt, and which tokens are targets."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mplug import IGNORED, UsageError
from mplug_preferences.lines import Answer, Preference, messages_of
from mplug_tokenization.json_lines import REMEDY
from mplug_tokenization.templates import ANSWERS, Template
from mplug_tokenization.vocabulary import Encoded, Vocabulary

TooLong = Literal["truncate", "drop"]
"""What happens to a pair that is longer than a sample."""


class Tokens(NamedTuple):
    """The tokens of a prompt with an answer, and the label of each: the next token if it belongs to the answer."""

    tokens: NDArray[np.int32]
    labels: NDArray[np.int64]


class Pair(NamedTuple):
    """Both answers of a pair, and the numbers of the line for both (`Preference.numbers`)."""

    chosen: Tokens
    rejected: Tokens
    numbers: Mapping[str, tuple[float, float]]

    @property
    def length(self) -> int:
        """The number of positions of both."""
        return len(self.chosen.tokens) + len(self.rejected.tokens)


@dataclass
class Count:
    """Counts of a split's pairs, by outcome."""

    pairs: int = 0
    truncated: int = 0
    too_long: int = 0
    without_answer: int = 0
    with_special_tokens: int = 0
    equal: int = 0

    def __str__(self) -> str:
        return (
            f"{self.truncated} truncated; dropped: {self.too_long} too long, {self.without_answer} without an answer, "
            f"{self.with_special_tokens} with a special token in their text, {self.equal} with equal answers"
        )


@dataclass(frozen=True)
class Encoder:
    """Encodes pairs by a template and a vocabulary, for samples of `length` tokens.

    The last token of an answer is a target alone; with `keeps_end`, it is an input too.
    """

    template: Template
    vocabulary: Vocabulary
    length: int
    too_long: TooLong
    keeps_end: bool = False

    def of(self, pairs: Iterable[Preference], count: Count) -> Iterator[Pair]:
        """The tokens of each pair that is kept; `count` counts all pairs. UsageError names a line that fails."""
        for pair in pairs:
            count.pairs += 1
            try:
                found = self._pair(pair, count)
            except UnicodeEncodeError:
                raise UsageError(f"{pair.where} has an unpaired surrogate in a text; {REMEDY}") from None
            except ValueError as error:
                raise UsageError(f"{pair.where}: {error}") from None
            if found is not None:
                yield found

    def _pair(self, pair: Preference, count: Count) -> Pair | None:
        if pair.chosen == pair.rejected:
            count.equal += 1
            return None
        if any(map(self.vocabulary.has_special, _texts(pair))):
            count.with_special_tokens += 1
            return None
        both = [self._tokens(pair.prompt, answer, pair.tools) for answer in (pair.chosen, pair.rejected)]
        lengths = [len(one.tokens) for one in both]
        if sum(lengths) > self.length:
            if self.too_long == "drop":
                count.too_long += 1
                return None
            count.truncated += 1
            both = [_cut(one, length) for one, length in zip(both, _shares(lengths, self.length), strict=True)]
        if not all((one.labels != IGNORED).any() for one in both):
            count.without_answer += 1
            return None
        return Pair(both[0], both[1], pair.numbers)

    def _tokens(self, prompt: Answer, answer: Answer, tools: Any) -> Tokens:
        """An answer after its prompt; of several messages, those of the assistant are targets."""
        if isinstance(prompt, str) and isinstance(answer, str):
            encoded = self.vocabulary.encode_answers(prompt + answer, ((len(prompt), len(prompt) + len(answer)),))
            end = self.vocabulary.tokenizer.eod
            if end is not None:
                encoded = Encoded([*encoded.tokens, end], [*encoded.answers, True])
        else:
            before = messages_of(prompt)
            rendered = self.template.render([*before, *messages_of(answer)], tools)
            in_prompt = sum(message["role"] == ANSWERS for message in before)
            encoded = self.vocabulary.encode_answers(rendered.text, rendered.answers[in_prompt:])
        tokens = np.asarray(encoded.tokens, dtype=np.int32)
        labels = np.where(encoded.answers[1:], tokens[1:], IGNORED).astype(np.int64)
        length = int(np.flatnonzero(labels != IGNORED).max(initial=-1)) + 1  # nothing follows the last target
        if self.keeps_end and length:  # but the last target itself
            length, labels = length + 1, np.append(labels, IGNORED)
        return Tokens(tokens[:length], labels[:length])


def _texts(pair: Preference) -> Iterator[str]:
    for part in (pair.prompt, pair.chosen, pair.rejected):
        if isinstance(part, str):
            yield part
        else:
            yield from (message.get("content") or "" for message in part)


def _shares(lengths: list[int], room: int) -> tuple[int, int]:
    """The positions of both answers: each has half of the room, and what the other one leaves of its half."""
    first = min(lengths[0], max(room // 2, room - lengths[1]))
    return first, min(lengths[1], room - first)


def _cut(one: Tokens, length: int) -> Tokens:
    return Tokens(one.tokens[:length], one.labels[:length])
