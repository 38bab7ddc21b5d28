"""Reads and encodes a split's conversations."""

from collections.abc import Iterable, Iterator

from mplug import UsageError
from mplug_packed.conversations import Conversation, read_conversations
from mplug_tokenization.conversations import Count, Encoder
from mplug_tokenization.json_lines import REMEDY, find_files
from mplug_tokenization.vocabulary import Encoded


def of_split(split: str, path: str, validation_path: str | None, percent: float) -> Iterator[Conversation]:
    """The conversations of a split, in the order of the files."""
    if validation_path is not None:
        yield from read_conversations(find_files(validation_path if split == "validation" else path))
        return
    for conversation in read_conversations(find_files(path)):
        if conversation.held_out(percent) == (split == "validation"):
            yield conversation


def encoded(conversations: Iterable[Conversation], encoder: Encoder, count: Count) -> Iterator[Encoded]:
    """The tokens of each conversation that is kept; `count` counts all conversations.

    Raises UsageError with the location if a conversation cannot be rendered.
    """
    for conversation in conversations:
        try:
            found = encoder.encode(conversation.messages, conversation.tools, count)
        except UnicodeEncodeError:
            raise UsageError(f"{conversation.where} has an unpaired surrogate in a text; {REMEDY}") from None
        except ValueError as error:
            raise UsageError(f"{conversation.where}: {error}") from None
        if found is not None:
            yield found
