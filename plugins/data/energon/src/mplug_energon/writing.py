"""From messages and media to tokens: by the chat template, with the tokens of media in their places."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mplug import IGNORED
from mplug_energon.faults import Unusable
from mplug_energon.messages import INVALID, Conversation
from mplug_energon.packing import Size
from mplug_streams import Medium, Processor
from mplug_tokenization.templates import Template
from mplug_tokenization.vocabulary import Encoded, Vocabulary

PLACE = "\ufdd0"
"""Stands for a medium in the text of a template that supports text only; Unicode reserves it for internal use."""
PLACE_TOKEN = -1
PLACES = {PLACE: PLACE_TOKEN}
SPECIAL, FAILING = "a special token in a text", "a template that fails"


@dataclass(frozen=True)
class Written:
    """The tokens of a conversation, whether each is a target, and its media with the places of their first tokens.

    `length` is the number of tokens that a sample has of it.
    """

    tokens: list[int]
    answers: list[bool]
    begins: list[int]
    media: list[Medium]
    length: int

    def media_within(self, budget: Size) -> tuple[int, int]:
        """The number of media that are whole within a budget, and the number of tokens before the next one."""
        rows = 0
        for number, (begin, medium) in enumerate(zip(self.begins, self.media, strict=True)):
            rows += medium.rows
            if begin + len(medium.tokens) > budget.tokens or rows > budget.rows:
                return number, min(begin, budget.tokens)
        return len(self.media), budget.tokens

    def labelled(self) -> tuple[Tensor, Tensor]:
        """(tokens [n], labels [n]); a label is the next token if it belongs to an answer."""
        tokens, targets = torch.tensor(self.tokens), torch.tensor(self.answers)
        labels = torch.full_like(tokens, IGNORED)
        labels[:-1] = torch.where(targets[1:], tokens[1:], IGNORED)
        return tokens[: self.length], labels[: self.length]


class Writer:
    """Writes conversations as tokens. The vocabulary has the token of places.

    A template that supports parts writes marks for a medium itself; the medium's tokens replace them. In the text of
    any other template, this class writes a place for each medium.
    """

    def __init__(self, template: Template, vocabulary: Vocabulary, processor: Processor) -> None:
        self.template, self.vocabulary, self.processor = template, vocabulary, processor
        marks = processor.placeholders | frozenset(vocabulary.special.values())
        self.marks = marks if template.takes_parts else frozenset({PLACE_TOKEN})
        example = processor.prepare(torch.zeros(1, 64, 64, 3, dtype=torch.uint8)).tokens
        self.vocab_size = max(vocabulary.vocab_size, *(token + 1 for token in (*processor.placeholders, *example)))

    def write(self, conversation: Conversation, media: Sequence[Medium]) -> Written:
        """The tokens of a conversation with these media. Raises Unusable."""
        for text in conversation.texts:
            if self.vocabulary.has_special(text):
                raise Unusable("a message has the text of a special token, which could end its turn", SPECIAL)
        messages = conversation.messages[: conversation.end]
        media = media[: sum(part["type"] != "text" for message in messages for part in message["content"])]
        media = [medium.written(self.vocabulary.encode) for medium in media]
        if not self.template.takes_parts:
            messages = [{**message, "content": _as_text(message)} for message in messages]
        try:
            rendered = self.template.render(messages, conversation.tools)
            rendered.text.encode()
        except UnicodeEncodeError:
            raise Unusable("it has an unpaired surrogate in a text", INVALID) from None
        except ValueError as error:
            raise Unusable(str(error), FAILING) from None
        return self._with_media(self.vocabulary.encode_answers(rendered.text, rendered.answers), media)

    def _with_media(self, encoded: Encoded, media: Sequence[Medium]) -> Written:
        """The tokens with those of the media in their places."""
        tokens, answers, begins, at = list[int](), list[bool](), list[int](), 0
        unread = list(media)
        while at < len(encoded.tokens):
            width = _marks_of(unread[0], encoded.tokens, at, self.marks) if unread else 0
            if width:
                begins.append(len(tokens))
                own = unread.pop(0).tokens
                tokens += own
                answers += [False] * len(own)
            else:
                tokens.append(encoded.tokens[at])
                answers.append(encoded.answers[at])
            at += max(width, 1)
        expected = sum(token in self.processor.placeholders for medium in media for token in medium.tokens)
        found = sum(token in self.processor.placeholders for token in tokens)
        if unread or found != expected or PLACE_TOKEN in tokens:
            raise Unusable(
                f"data.template '{self.template.name}' writes marks of {len(media) - len(unread)} of its {len(media)} "
                f"pictures, or more; use the tokenizer and the template of the model",
                FAILING,
            )
        return Written(tokens, answers, begins, list(media), len(tokens))


def _as_text(message: dict[str, Any]) -> str | None:
    """The content of a message as text; None if there is none."""
    parts = message["content"]
    return "".join(part["text"] if part["type"] == "text" else PLACE for part in parts) if parts else None


def _marks_of(medium: Medium, tokens: Sequence[int], at: int, marks: frozenset[int]) -> int:
    """The number of tokens from `at` on that mark a medium: the place of one, or `marks` in the order of its tokens."""
    if tokens[at] == PLACE_TOKEN:
        return 1
    order = [token for token in dict.fromkeys(medium.tokens) if token in marks]
    end = at
    while end < len(tokens) and tokens[end] in order:
        order = order[order.index(tokens[end]) + 1 :]
        end += 1
    return end - at
