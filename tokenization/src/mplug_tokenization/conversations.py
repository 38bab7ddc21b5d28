"""Encodes conversations: what is wrong with one, its tokens and targets, and counts of the omitted ones."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from mplug_tokenization.templates import ANSWERS, Template
from mplug_tokenization.vocabulary import Encoded, Vocabulary

TooLong = Literal["truncate", "drop"]
"""What happens to a conversation that is longer than a sample."""


@dataclass
class Count:
    """Counts of a split's conversations, by outcome."""

    conversations: int = 0
    truncated: int = 0
    too_long: int = 0
    without_answer: int = 0
    with_special_tokens: int = 0

    @property
    def kept(self) -> int:
        """The number of conversations in the samples."""
        return self.conversations - self.too_long - self.without_answer - self.with_special_tokens

    def __str__(self) -> str:
        return (
            f"{self.truncated} truncated; dropped: {self.too_long} too long, {self.without_answer} without an answer, "
            f"{self.with_special_tokens} with a special token in their text"
        )


def message_fault(message: Any) -> str:
    """What is wrong with a message, as the end of a sentence ('has no string 'role'; ...'); '' if it is valid."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        return f'has no string \'role\'; write a message as {{"role": "{ANSWERS}", "content": "..."}}'
    content = message.get("content")
    if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
        kind = "no 'content'" if content is None else f"a 'content' of type {type(content).__name__}"
        return f"has {kind}; 'content' must be a string"
    return ""


@dataclass(frozen=True)
class Encoder:
    """Encodes conversations by a template and a vocabulary, for samples of `length` tokens."""

    template: Template
    vocabulary: Vocabulary
    length: int
    too_long: TooLong

    def encode(self, messages: Sequence[Mapping[str, Any]], tools: Any, count: Count) -> Encoded | None:
        """The tokens of a valid conversation, or None if it is omitted; `count` counts the outcome.

        A conversation is too long if it has more than `length` + 1 tokens (`length` inputs and the last target). Two
        kinds are always omitted: those without an answer among the first `length` targets, and those whose messages
        contain the text of a special token, because encoding it as that token would let a message end its own turn.
        Raises ValueError if the template fails, and UnicodeEncodeError for an unpaired surrogate.
        """
        count.conversations += 1
        if any(self.vocabulary.has_special(message.get("content") or "") for message in messages):
            count.with_special_tokens += 1
            return None
        rendered = self.template.render(messages, tools)
        rendered.text.encode()
        found = self.vocabulary.encode_answers(rendered.text, rendered.answers)
        if not any(found.answers[1 : self.length + 1]):
            count.without_answer += 1
            return None
        if len(found.tokens) > self.length + 1:
            if self.too_long == "drop":
                count.too_long += 1
                return None
            count.truncated += 1
        return found
