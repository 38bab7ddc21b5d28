"""Conversations in JSON: messages whose content is text, or a list of parts of text, pictures and videos.

A picture is `{"type": "image"}` (the next one of the sample) or `{"type": "image", "image": "FILE"}`. A video is
`{"type": "video", "video": ["FILE", ...], "fps": 2}`, a file for each frame.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from mplug_energon.faults import Unusable
from mplug_tokenization.templates import ANSWERS

INVALID = "an invalid conversation"
WRONG = 'write {"messages": [{"role": "user", "content": "..."}, ...]}'
NAMES = ("image", "path")
"""The keys of a part that may have the file of a picture."""


@dataclass(frozen=True)
class Mention:
    """A picture or a video in a message, by the files of its frames; None: the next picture of the sample.

    `rate` is the number of frames of a video in a second, if the message states it.
    """

    files: tuple[str, ...] | None
    is_video: bool = False
    rate: float | None = None


@dataclass(frozen=True)
class Conversation:
    """The messages with their content as lists of parts, and the pictures and videos that they mention, in order.

    `pictures` are the files that the conversation itself lists as its pictures; None: it lists none. `weight`
    multiplies the losses of its targets.
    """

    messages: list[dict[str, Any]]
    mentions: tuple[Mention, ...]
    pictures: tuple[str, ...] | None
    tools: Any
    weight: float = 1.0

    @property
    def end(self) -> int:
        """The number of messages up to the last answer."""
        return max((number for number, one in enumerate(self.messages, 1) if one["role"] == ANSWERS), default=0)

    @property
    def texts(self) -> Iterator[str]:
        """All texts of its messages."""
        return (part["text"] for message in self.messages for part in message["content"] if part["type"] == "text")


def read_conversation(data: bytes, mark: str | None) -> Conversation:
    """The conversation of a JSON file; `mark` in content that is text stands for a picture. Raises Unusable."""
    try:
        record: Any = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise Unusable(f"its JSON cannot be read: {error}", INVALID) from None
    messages = record.get("messages") if isinstance(record, dict) else None
    if not isinstance(messages, list):
        raise Unusable(f"its JSON has no list 'messages'; {WRONG}", INVALID)
    weight = record.get("weight", 1)
    if not (is_positive(weight) or (weight == 0 and type(weight) in (int, float))):
        raise Unusable(f"it has the weight {weight!r}; a weight is a number of at least 0", INVALID)
    mentions: list[Mention] = []
    read = [_message(message, number, mark, mentions) for number, message in enumerate(messages, start=1)]
    return Conversation(read, tuple(mentions), _listed(record.get("images")), record.get("tools"), float(weight))


def is_positive(value: Any) -> bool:
    """Whether a value of JSON is a finite number above 0."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < float("inf")


def _listed(images: Any) -> tuple[str, ...] | None:
    if images is None:
        return None
    if not isinstance(images, list) or not all(isinstance(name, str) for name in images):
        raise Unusable("its 'images' is no list of file names", INVALID)
    return tuple(images)


def _message(message: Any, number: int, mark: str | None, mentions: list[Mention]) -> dict[str, Any]:
    """A message with its content as a list of parts; what it mentions is appended to `mentions`."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise Unusable(f"message {number} has no string 'role'; {WRONG}", INVALID)
    content = message.get("content")
    if isinstance(content, str):
        content = _split(content, mark)
    elif content is None and message.get("tool_calls"):
        content = []
    if not isinstance(content, list):
        raise Unusable(f"the 'content' of message {number} is neither text nor a list of parts", INVALID)
    return {**message, "content": [_part(part, number, mentions) for part in content]}


def _split(text: str, mark: str | None) -> list[dict[str, Any]]:
    """The parts of text with marks for pictures."""
    first, *others = text.split(mark) if mark else [text]
    parts: list[dict[str, Any]] = [{"type": "text", "text": first}] if first or not others else []
    for other in others:
        parts.append({"type": "image"})
        parts += [{"type": "text", "text": other}] if other else []
    return parts


def _part(part: Any, number: int, mentions: list[Mention]) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "text" and isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    if kind == "image" and not part.keys() - {"type", *NAMES}:
        name = next((part[key] for key in NAMES if part.get(key) is not None), None)
        if name is None or isinstance(name, str):
            mentions.append(Mention(None if name is None else (name,)))
            return {"type": "image"}
    if kind == "video" and not part.keys() - {"type", "video", "fps"}:
        frames, rate = part.get("video"), part.get("fps")
        has_frames = isinstance(frames, list) and frames and all(isinstance(name, str) for name in frames)
        if has_frames and (rate is None or is_positive(rate)):
            mentions.append(Mention(tuple(frames), is_video=True, rate=rate))
            return {"type": "video"}
    raise Unusable(
        f'message {number} has the part {json.dumps(part)[:120]}; a part is a text ({{"type": "text", "text": '
        f'"..."}}), a picture ({{"type": "image"}}, with the key \'image\' for its file) or a video '
        f'({{"type": "video", "video": ["FILE", ...], "fps": 2}})',
        INVALID,
    )
