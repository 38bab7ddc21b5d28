"""Reads and encodes a split's conversations, and counts the omitted ones."""

from collections.abc import Iterable, Iterator
from typing import Literal

from mplug import UsageError
from mplug_packed.conversations import REMEDY, Conversation, find_files, read_conversations
from mplug_tokenization.packed_samples import Count
from mplug_tokenization.templates import Template
from mplug_tokenization.vocabulary import Encoded, Vocabulary


def of_split(split: str, path: str, validation_path: str | None, percent: float) -> Iterator[Conversation]:
    """The conversations of a split, in the order of the files."""
    if validation_path is not None:
        yield from read_conversations(find_files(validation_path if split == "validation" else path))
        return
    for conversation in read_conversations(find_files(path)):
        if conversation.held_out(percent) == (split == "validation"):
            yield conversation


def encoded(
    conversations: Iterable[Conversation],
    template: Template,
    vocabulary: Vocabulary,
    length: int,
    too_long: Literal["truncate", "drop"],
    count: Count,
) -> Iterator[Encoded]:
    """The tokens of each conversation that is kept; `count` counts all conversations.

    A conversation is too long if it has more than `length` + 1 tokens (`length` inputs and the last target). Two kinds
    are omitted: those without an answer among the first `length` targets, and those whose messages contain the text of
    a special token, because encoding it as that token would let a message end its own turn. Raises UsageError with the
    location if a conversation cannot be rendered.
    """
    for conversation in conversations:
        count.conversations += 1
        if any(vocabulary.has_special(message.get("content") or "") for message in conversation.messages):
            count.with_special_tokens += 1
            continue
        try:
            rendered = template.render(conversation.messages, conversation.tools)
            rendered.text.encode()
        except UnicodeEncodeError:
            raise UsageError(f"{conversation.where} has an unpaired surrogate in a text; {REMEDY}") from None
        except ValueError as error:
            raise UsageError(f"{conversation.where}: {error}") from None
        found = vocabulary.encode_answers(rendered.text, rendered.answers)
        if not any(found.answers[1 : length + 1]):
            count.without_answer += 1
        elif len(found.tokens) <= length + 1:
            yield found
        elif too_long == "drop":
            count.too_long += 1
        else:
            count.truncated += 1
            yield found
