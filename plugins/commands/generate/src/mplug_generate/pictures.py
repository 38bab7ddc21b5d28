"""The pictures of prompts: their files, and their places among the tokens. Functions import torch themselves."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mplug import UsageError
from mplug_generate.prompts import Prompt

if TYPE_CHECKING:
    from mplug import Medium, Processor

Encode = Callable[[str], list[int]]
"""A text -> its tokens."""


@dataclass(frozen=True)
class Encoded:
    """The tokens of a prompt, and those of them that are text: without the tokens of media."""

    tokens: tuple[int, ...]
    text: tuple[int, ...]

    @classmethod
    def of_text(cls, tokens: Sequence[int]) -> "Encoded":
        """The tokens of a prompt without media."""
        found = tuple(tokens)
        return cls(found, found)


PLACE = (-1,)
"""The mark of a picture where a chat template supports texts only (`Tokenizer.encode_chat`)."""


def prepared(prompt: Prompt, processor: "Processor") -> "list[Medium]":
    """The pictures of a prompt; UsageError that names the first one that the model cannot take."""
    return [_prepared(path, prompt, processor) for path in prompt.images]


def _prepared(path: Path, prompt: Prompt, processor: "Processor") -> "Medium":
    from mplug_nn.pictures import decode_picture

    try:
        return processor.prepare(decode_picture(path.read_bytes()), len(prompt.images))
    except OSError as error:
        reason = error.strerror or str(error)
    except (UsageError, ValueError) as error:
        reason = str(error)
    raise UsageError(f"{prompt.where}: the image '{path}' cannot be used: {reason}; use another image")


def encoded(
    prompt: Prompt, tokens: Sequence[int], processor: "Processor", encode: Encode, *, of_folder: bool
) -> Encoded:
    """A prompt with its pictures in the places that its tokens mark (`Medium.mark`), one mark for each picture.

    `encode` encodes parts of a text. If nothing is marked and the model is not that of a folder, the pictures stand
    where the prompt says (`Prompt.places`). UsageError if there is no such place.
    """
    media = [medium.written(encode) for medium in prepared(prompt, processor)]
    places = _places(tokens, {PLACE, *(medium.mark for medium in media)} - {()})
    if len(places) == len(media):
        ends = [0, *(end for _, end in places)]
        texts = [tokens[end:begin] for end, (begin, _) in zip(ends, places, strict=False)]
        texts.append(tokens[ends[-1] :])
    elif not of_folder and not places:
        texts = [encode(text) for text in prompt.pieces()]
    else:
        raise UsageError(_without_place(prompt, media, len(places), of_folder=of_folder))
    found = list(texts[0])
    for medium, text in zip(media, texts[1:], strict=True):
        found += [*medium.tokens, *text]
    made = Encoded(tuple(found), tuple(token for text in texts for token in text))
    if stray := processor.placeholders.intersection(made.text):
        raise UsageError(
            f"{prompt.where} has the token {min(stray)} in its text, which stands for a part of an image; remove it"
        )
    return made


def _places(tokens: Sequence[int], marks: set[tuple[int, ...]]) -> list[tuple[int, int]]:
    """The ranges of tokens that are marks, in order."""
    found, begin = list[tuple[int, int]](), 0
    while begin < len(tokens):
        length = next((len(mark) for mark in marks if tuple(tokens[begin : begin + len(mark)]) == mark), 0)
        if length:
            found.append((begin, begin + length))
        begin += length or 1
    return found


def _without_place(prompt: Prompt, media: "Sequence[Medium]", number: int, *, of_folder: bool) -> str:
    has = f"{prompt.where} has {len(media)} {'image' if len(media) == 1 else 'images'}"
    if prompt.messages:
        return (
            f"{has}, and the chat template of the folder writes {number} of the marks that the model knows; use the "
            f"template of a model that sees, and write no mark into a text"
        )
    remedy = "add --chat, or write the mark" if of_folder else "write the mark"
    return f"{has}, and its text has the marks of {number}; {remedy} of an image once for each of them"
