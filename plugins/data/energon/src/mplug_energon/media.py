"""The pictures and videos of a conversation: from files of the sample, or of the data set's folder."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from mplug import UsageError
from mplug_energon.faults import Unusable
from mplug_energon.messages import Conversation, Mention
from mplug_nn.pictures import decode_picture
from mplug_streams import Medium, Processor

PICTURES = ("png", "jpg", "jpeg", "webp", "bmp", "gif", "tif", "tiff")
"""Suffixes of the files of a sample that are its pictures."""
MISSING, OUTSIDE, ABSENT = "a missing file", "a file outside of the data set", "an absent picture"
UNMENTIONED, DAMAGED, UNSUPPORTED = "a picture that no text mentions", "a damaged picture", "an unsupported picture"


@dataclass(frozen=True)
class Files:
    """The files of a sample, by their names without its key, and the folder of its data set; None: not local."""

    key: str
    own: Mapping[str, bytes]
    folder: Path | None

    @property
    def pictures(self) -> tuple[str, ...]:
        """The names of the sample's pictures, in the order of the numbers in them."""
        names = (name for name in self.own if name.rpartition(".")[2].lower() in PICTURES)
        return tuple(sorted(names, key=_natural))

    def own_name(self, name: str) -> str:
        """A name without the sample's key before it: '0.png' for 'KEY.0.png'."""
        return name if name in self.own else name.removeprefix(f"{self.key.rpartition('/')[2]}.")

    def read(self, name: str) -> bytes:
        """A file of the sample, or one of the data set's folder by its relative name. Raises Unusable."""
        if (own := self.own.get(self.own_name(name))) is not None:
            return own
        if "://" in name or self.folder is None:
            raise Unusable(f"the picture '{name[:200]}' is not in the sample, and not in a local folder", MISSING)
        try:
            root = self.folder.resolve()
            found = (root / name).resolve()
            if not found.is_relative_to(root):
                raise Unusable(
                    f"the picture '{name[:200]}' is outside of the data set's folder '{root}'; copy it into the folder",
                    OUTSIDE,
                )
            if found.is_file():
                return found.read_bytes()
        except (OSError, ValueError) as error:
            raise Unusable(f"the picture '{name[:200]}' cannot be read: {error}", MISSING) from None
        raise Unusable(
            f"the picture '{name[:200]}' is neither a file of the sample nor one of the data set's folder '{root}'",
            MISSING,
        )


@dataclass(frozen=True)
class Preparation:
    """What prepares media: the processor of the model, and the tokens of texts that stand between frames of videos.

    `rate` is that of videos whose part of a message states none.
    """

    processor: Processor
    encode: Callable[[str], Sequence[int]]
    most_pixels: int
    rate: float | None


def prepare_media(conversation: Conversation, files: Files, preparation: Preparation) -> list[Medium]:
    """The media that a conversation mentions, in order.

    Raises Unusable if it mentions an absent picture or has one that it does not mention, if a file is missing, outside
    of the data set's folder or damaged, and if the model cannot take a picture.
    """
    chosen = _files_of(conversation, files)
    number = sum(not mention.is_video for mention, _ in chosen)
    return [_prepared(mention, names, files, preparation, number) for mention, names in chosen]


def _files_of(conversation: Conversation, files: Files) -> list[tuple[Mention, tuple[str, ...]]]:
    """The names of the files of each mention."""
    pictures = files.pictures if conversation.pictures is None else conversation.pictures
    following, chosen = iter(pictures), list[tuple[Mention, tuple[str, ...]]]()
    for mention in conversation.mentions:
        names = mention.files
        if names is None:
            picture = next(following, None)
            if picture is None:
                wanted = sum(one.files is None for one in conversation.mentions)
                raise Unusable(f"its text mentions {wanted} pictures, and it has {len(pictures)}", ABSENT)
            names = (picture,)
        chosen.append((mention, names))
    mentioned = {files.own_name(name) for _, names in chosen for name in names}
    for name in (*pictures, *files.pictures):
        if files.own_name(name) not in mentioned:
            raise Unusable(f"no message mentions its picture '{name[:200]}'", UNMENTIONED)
    return chosen


def _prepared(
    mention: Mention, names: Sequence[str], files: Files, preparation: Preparation, num_pictures: int
) -> Medium:
    frames = []
    for name in names:
        try:
            frames.append(decode_picture(files.read(name), preparation.most_pixels))
        except ValueError as error:
            raise Unusable(f"the picture '{name[:200]}': {error}", DAMAGED) from None
    what = f"the video of '{names[0][:200]}'" if mention.is_video else f"the picture '{names[0][:200]}'"
    if len({frame.shape for frame in frames}) > 1:
        raise Unusable(f"{what} has frames of different sizes", UNSUPPORTED)
    try:
        if mention.is_video:
            return _video(torch.cat(frames), mention, preparation)
        return preparation.processor.prepare(torch.cat(frames), num_pictures)
    except (ValueError, UsageError) as error:
        raise Unusable(f"{what}: {error}", UNSUPPORTED) from None


def _video(frames: Tensor, mention: Mention, preparation: Preparation) -> Medium:
    prepare = getattr(preparation.processor, "prepare_video", None)
    rate = preparation.rate if mention.rate is None else mention.rate
    if prepare is None:
        raise ValueError("the model takes no videos")
    if rate is None:
        raise ValueError("its number of frames in a second is unknown; add 'fps' to its part, or set data.video_fps")
    found: Medium = prepare(frames, rate, preparation.encode)
    return found


def _natural(name: str) -> list[tuple[int, int, str]]:
    """A key that orders numbers in names by their values."""
    parts = re.findall(r"\d+|\D+", name)
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in parts]
