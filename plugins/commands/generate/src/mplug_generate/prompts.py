"""The prompts of `mplug generate`: files of prompts, and the texts that follow them, token by token."""

import json
import re
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from mplug import UsageError
from mplug_sampling.text import Text

OWN_FIELDS = ("completion", "num_tokens", "ended")
"""The fields that `mplug generate` adds to a line of its output."""


FRAMES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff")
"""Suffixes of files in the folder of a video that are its frames."""


@dataclass(frozen=True)
class Shown:
    """A picture or a video of a prompt: its file, or those of its frames. A second has `rate` frames; None: a picture.

    `name` is the file or the folder by which errors name it.
    """

    name: Path
    files: tuple[Path, ...]
    rate: float | None = None

    @property
    def kind(self) -> str:
        """The type of a part that templates know."""
        return "image" if self.rate is None else "video"

    @classmethod
    def image(cls, file: Path) -> "Shown":
        """A picture."""
        return cls(file, (file,))


@dataclass(frozen=True)
class Prompt:
    """A prompt of a file or of the command line: a text, or the messages of a chat.

    `fields` are those of its line in a JSONL file; the output repeats them. `where` names the prompt in errors.
    `media` are its pictures and videos, in order. Those of a text stand before the characters with the numbers
    `places`; those of messages stand in the place of parts {"type": "image"} and {"type": "video"}.
    """

    where: str
    text: str = ""
    messages: tuple[Mapping[str, Any], ...] = ()
    fields: Mapping[str, Any] = field(default_factory=dict)
    media: tuple[Shown, ...] = ()
    places: tuple[int, ...] = ()

    def pieces(self) -> list[str]:
        """The text before the first picture or video, between two, and behind the last one."""
        ends = (0, *self.places, len(self.text))
        return [self.text[begin:end] for begin, end in pairwise(ends)]


def given_prompt(text: str, media: Sequence[Shown], *, chat: bool) -> Prompt:
    """The prompt of the command line: its pictures and videos come first."""
    if chat and media:
        parts: list[Mapping[str, str]] = [{"type": one.kind} for one in media]
        parts += [{"type": "text", "text": text}] if text else []
        return Prompt("--prompt", messages=({"role": "user", "content": parts},), media=tuple(media))
    return Prompt("--prompt", text, media=tuple(media), places=(0,) * len(media))


def video_of(folder: Path, rate: float) -> Shown:
    """The video whose frames are the pictures of a folder, in the order of the numbers in their names."""
    files = sorted((path for path in folder.iterdir() if path.suffix.lower() in FRAMES), key=_natural)
    if not files:
        raise UsageError(
            f"--video '{folder}' has no frames, which are files {', '.join(FRAMES)}; write the frames of a video there "
            f"(ffmpeg -i FILE -vf fps=2 {folder}/%04d.png)"
        )
    return Shown(folder, tuple(files), rate)


def _natural(path: Path) -> list[tuple[int, int, str]]:
    """A key that orders numbers in names by their values."""
    parts = re.findall(r"\d+|\D+", path.name)
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in parts]


def is_text(text: str) -> bool:
    """Whether a text of the command line or of JSON consists of characters: UTF-8 has no form for half of one."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def read_prompts(path: Path, *, chat: bool) -> list[Prompt]:
    """The prompts of a file: JSON lines if its name ends in '.jsonl', else a text of one prompt per line.

    A byte order mark at the beginning of the file is no part of a prompt. Raises UsageError that names the first line
    which is no prompt.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UsageError(f"cannot read --prompts '{path}': {reason}") from None
    if lines[-1] == "":
        lines.pop()
    if not lines:
        raise UsageError(f"--prompts '{path}' is empty; write one prompt per line")
    read = partial(_json_line, chat=chat, folder=path.parent) if path.suffix == ".jsonl" else _text_line
    return [read(line.removesuffix("\r"), f"'{path}', line {number}") for number, line in enumerate(lines, 1)]


def _text_line(line: str, where: str) -> Prompt:
    if not line:
        raise UsageError(f"{where} is empty; write a prompt there, or remove the line")
    return Prompt(where, line, fields={"prompt": line})


def _json_line(line: str, where: str, *, chat: bool, folder: Path) -> Prompt:
    try:
        value = json.loads(line, object_pairs_hook=_once)
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()  # the output repeats it
    except UnicodeEncodeError as error:
        part = error.object[error.start].encode("ascii", "backslashreplace").decode()
        raise UsageError(f"{where} has '{part}', which is half a character; write the whole character") from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{where} is no JSON: {error}; a line is an object with the field 'prompt'") from None
    fields = {"prompt": value} if isinstance(value, str) else value
    if not isinstance(fields, dict):
        raise UsageError(f"{where} is neither an object nor a text; write an object with the field 'prompt'")
    if used := [name for name in OWN_FIELDS if name in fields]:
        raise UsageError(f"{where} has the field '{used[0]}', which the output uses for its own; rename the field")
    if chat and "messages" in fields:
        return _conversation(fields, where, folder)
    text = fields.get("prompt")
    if isinstance(text, list) and text:
        parts = _parts(text, f"{where}: 'prompt'", folder)
        if chat:
            return _of_messages([{"role": "user", "content": parts}], where, fields)
        return _of_parts(parts, where, fields)
    if not isinstance(text, str) or not text:
        also = " or 'messages'" if chat else ""
        raise UsageError(f"{where} has no text in the field 'prompt'; every line needs 'prompt'{also}")
    return Prompt(where, text, fields=fields)


def _once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """The object; ValueError if a field stands in it twice, of which JSON would keep the last one."""
    fields = dict(pairs)
    if len(fields) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the field '{next(name for name in names if names.count(name) > 1)}' stands there twice")
    return fields


Part = str | Shown


def _conversation(fields: Mapping[str, Any], where: str, folder: Path) -> Prompt:
    value = fields["messages"]
    fits = isinstance(value, list) and all(
        isinstance(one, dict) and isinstance(one.get("role"), str) and isinstance(one.get("content"), str | list)
        for one in value
    )
    if not fits or not value:
        raise UsageError(
            f"{where}: 'messages' must be a list of objects with the text 'role', and with 'content', which is a text "
            f"or a list of parts"
        )
    read = partial(_parts, where=f"{where}: 'content'", folder=folder)
    messages = [one if isinstance(one["content"], str) else {**one, "content": read(one["content"])} for one in value]
    return _of_messages(messages, where, fields)


def _parts(value: Sequence[Any], where: str, folder: Path) -> list[Part]:
    """The parts of a content; file names are relative to the folder of the prompts."""
    found = list[Part]()
    for part in value:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "text" and isinstance(part.get("text"), str):
            found.append(part["text"])
        elif kind == "image" and isinstance(part.get("image"), str) and part["image"]:
            found.append(Shown.image(folder / part["image"]))
        elif kind == "video" and _is_video(part):
            files = tuple(folder / name for name in part["video"])
            found.append(Shown(files[0], files, float(part["fps"])))
        else:
            raise UsageError(
                f'{where} has a part that is neither {{"type": "text", "text": TEXT}} nor {{"type": "image", "image": '
                f'FILE}} nor {{"type": "video", "video": [FILE, ...], "fps": FRAMES IN A SECOND}}; correct it'
            )
    return found


def _is_video(part: Mapping[str, Any]) -> bool:
    """Whether a part has the files of frames, and their number in a second."""
    files: Any = part.get("video")
    rate: Any = part.get("fps")
    has_files = isinstance(files, list) and bool(files) and all(isinstance(name, str) and name for name in files)
    return has_files and isinstance(rate, int | float) and not isinstance(rate, bool) and 0 < rate < float("inf")


def _of_parts(parts: Sequence[Part], where: str, fields: Mapping[str, Any]) -> Prompt:
    text, places = "", list[int]()
    for part in parts:
        if isinstance(part, str):
            text += part
        else:
            places.append(len(text))
    media = tuple(part for part in parts if isinstance(part, Shown))
    return Prompt(where, text, fields=fields, media=media, places=tuple(places))


def _of_messages(messages: Sequence[Mapping[str, Any]], where: str, fields: Mapping[str, Any]) -> Prompt:
    """A conversation, whose parts are those that templates know. Parts that are all texts become one text."""
    media, found = list[Shown](), list[Mapping[str, Any]]()
    for message in messages:
        parts = message["content"]
        if isinstance(parts, str):
            found.append(message)
            continue
        own = [part for part in parts if isinstance(part, Shown)]
        templates = [{"type": "text", "text": part} if isinstance(part, str) else {"type": part.kind} for part in parts]
        found.append({**message, "content": templates if own else "".join(parts)})
        media += own
    return Prompt(where, messages=tuple(found), fields=fields, media=tuple(media))


def output_line(prompt: Prompt, text: Text) -> str:
    """The line of the output for a prompt: its fields, the text, its number of tokens, and why it ended."""
    own = dict(zip(OWN_FIELDS, (text.text, text.num_tokens, text.ended), strict=True))
    return json.dumps({**prompt.fields, **own}, ensure_ascii=False)


def occurrences(prompts: Iterable[Hashable]) -> Iterator[int]:
    """For each prompt, how often an equal one came before."""
    counts: dict[Hashable, int] = {}
    for prompt in prompts:
        counts[prompt] = counts.get(prompt, -1) + 1
        yield counts[prompt]
