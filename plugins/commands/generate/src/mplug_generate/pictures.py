"""Pictures and videos of prompts: their files, and their places among the tokens. Functions import torch themselves."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mplug import UsageError
from mplug_generate.prompts import Prompt, Shown

if TYPE_CHECKING:
    from torch import Tensor

    from mplug_streams import Medium, Processor

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
"""The mark of a picture or a video where a chat template supports texts only (`Tokenizer.encode_chat`)."""


def prepared(prompt: Prompt, processor: "Processor", encode: Encode) -> "list[Medium]":
    """The media of a prompt; UsageError that names the first one that the model cannot take.

    `encode` encodes texts between the frames of a video.
    """
    return [_prepared(shown, prompt, processor, encode) for shown in prompt.media]


def _prepared(shown: Shown, prompt: Prompt, processor: "Processor", encode: Encode) -> "Medium":
    try:
        content = _content(shown)
        if shown.rate is None:
            return processor.prepare(content, sum(one.rate is None for one in prompt.media))
        if not hasattr(processor, "prepare_video"):
            raise ValueError("the model takes no videos")
        medium: Medium = processor.prepare_video(content, shown.rate, encode)
        return medium
    except OSError as error:
        reason = error.strerror or str(error)
        reason = reason if error.filename in (None, str(shown.name)) else f"'{error.filename}': {reason}"
    except (UsageError, ValueError) as error:
        reason = str(error)
    what = f"the {shown.kind} '{shown.name}'"
    raise UsageError(f"{prompt.where}: {what} cannot be used: {reason}; use another {shown.kind}")


def _content(shown: Shown) -> "Tensor":
    """The frames [F, H, W, 3] of a picture or a video. Raises ValueError unless they have one size."""
    import torch

    from mplug_nn.pictures import decode_picture

    frames = []
    for file in shown.files:
        try:
            frames.append(decode_picture(file.read_bytes()))
        except ValueError as error:
            raise error if shown.rate is None else ValueError(f"'{file.name}': {error}") from error
        if frames[-1].shape != frames[0].shape:
            sizes = [f"{frame.shape[2]} x {frame.shape[1]}" for frame in (frames[0], frames[-1])]
            raise ValueError(f"its frames have different sizes: '{file.name}' has {sizes[1]} pixels, not {sizes[0]}")
    return torch.cat(frames)


def encoded(
    prompt: Prompt, tokens: Sequence[int], processor: "Processor", encode: Encode, *, of_folder: bool
) -> Encoded:
    """A prompt with its media in the places that its tokens mark (`Medium.mark`), one mark for each of them.

    `encode` encodes parts of a text. If nothing is marked and the model is not that of a folder, the media stand where
    the prompt says (`Prompt.places`). UsageError if there is no such place.
    """
    media = [medium.written(encode) for medium in prepared(prompt, processor, encode)]
    places = _places(tokens, {PLACE, *(medium.mark for medium in media)} - {()})
    if len(places) == len(media):
        _refuse_another_order(prompt, [tuple(tokens[begin:end]) for begin, end in places], media)
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


def _refuse_another_order(prompt: Prompt, marks: Sequence[tuple[int, ...]], media: "Sequence[Medium]") -> None:
    """Raise UsageError if the mark of an image stands in the place of a video, or the reverse."""
    if any(mark not in (PLACE, medium.mark) for mark, medium in zip(marks, media, strict=True)):
        raise UsageError(
            f"{prompt.where} has the marks of its images and videos in another order than these, which are "
            f"{', '.join(shown.kind for shown in prompt.media)}; put them into one order"
        )


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
    kinds = sorted({shown.kind for shown in prompt.media})
    has = f"{prompt.where} has {len(media)} {' and '.join(kind if len(media) == 1 else f'{kind}s' for kind in kinds)}"
    if prompt.messages:
        return (
            f"{has}, and the chat template of the folder writes {number} of the marks that the model knows; use the "
            f"template of a model that sees, and write no mark into a text"
        )
    remedy = "add --chat, or write the mark" if of_folder else "write the mark"
    each = " and of ".join("an image" if kind == "image" else "a video" for kind in kinds)
    return f"{has}, and its text has the marks of {number}; {remedy} of {each} once for each of them"
