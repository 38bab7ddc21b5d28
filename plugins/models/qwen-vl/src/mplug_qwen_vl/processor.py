"""From pictures and videos to the entries of the tower. F frames, H rows and W columns of pixels, P patches.

The module imports without torch.
"""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from mplug import Medium
from mplug_qwen_vl.vision import VisionConfig

if TYPE_CHECKING:
    from torch import Tensor

    from mplug import MicroBatch, Seen
    from mplug_qwen_vl.stream import Document

LONGEST_RATIO = 200
"""Maximum ratio of the sides of a picture."""


class VisionProcessor:
    """Resizes pictures to whole squares of patches, cuts them into patches, and finds their places among the tokens.

    A medium of one frame is a picture, one of several frames a video. A video is refused if the text has a time before
    each of its frames (Qwen3-VL): the processor has no tokenizer.
    """

    def __init__(self, vision: VisionConfig) -> None:
        self.vision = vision
        self.placeholders = frozenset({vision.image_token, vision.video_token})
        windows = () if vision.window_size is None else ("window_lengths",)
        self.entries = ("patches", "patch_places", "patch_lengths", *windows, "vision_rows", "coordinates")

    def prepare(self, content: "Tensor", num_pictures: int = 1) -> Medium:
        """The patches of frames [F, H, W, 3], and the tokens that stand for them."""
        from mplug_nn.pictures import resize_frames, standardized
        from mplug_qwen_vl.stream import Grid

        vision, is_video = self.vision, len(content) > 1
        if is_video and vision.tokens_per_second is None:
            raise ValueError(
                f"this model has the time of each frame of a video in the text, so a video of {len(content)} frames "
                f"cannot be prepared without its text"
            )
        height, width = fitted(len(content), content.shape[1], content.shape[2], vision)
        frames = standardized(resize_frames(content, height, width), vision.pixel_mean, vision.pixel_std)
        patches = cut(frames, vision)
        grid = Grid(-(-len(content) // vision.patch_frames), height // vision.patch_size, width // vision.patch_size)
        token = vision.video_token if is_video else vision.image_token
        number = grid.num_patches // vision.merge_size**2
        start, end = vision.start_token, vision.end_token
        return Medium((start, *[token] * number, end), grid.num_patches, (grid, patches), mark=(start, token, end))

    def entries_of(
        self, tokens: "Tensor", media: Sequence[Sequence[Medium]], document_lengths: "Tensor | None" = None
    ) -> "Mapping[str, Tensor]":
        """The entries of a micro batch; without a picture in it, they hold one square of zeros."""
        from mplug_qwen_vl.stream import micro_batch_entries

        samples = []
        for number, (row, own) in enumerate(zip(tokens.tolist(), media, strict=True)):
            lengths = [len(row)] if document_lengths is None else document_lengths[number].tolist()
            try:
                samples.append(self._documents(row, lengths, own))
            except ValueError as error:
                raise ValueError(f"sample {number} of the micro batch: {error}") from error
        patches = [medium.values[1] for own in media for medium in own]
        return micro_batch_entries(samples, tokens.shape[1], self.vision, patches)

    def contents_of(self, batch: "MicroBatch") -> "list[list[Seen]]":
        """The pictures and videos of each sample, restored from the patches of a micro batch."""
        from mplug_qwen_vl.restoring import contents_of

        return contents_of(batch, self.vision)

    def _documents(self, row: list[int], lengths: Sequence[int], media: Sequence[Medium]) -> "list[Document]":
        """The documents of a sample, each with the media whose tokens it has."""
        from mplug_qwen_vl.stream import read_document

        found, start, unread = [], 0, list(media)
        for length in (length for length in lengths if length):
            own = row[start : start + length]
            start += length
            left = sum(token in self.placeholders for token in own) * self.vision.merge_size**2
            within = []
            while unread and unread[0].rows <= left:
                left -= unread[0].rows
                within.append(unread.pop(0).values[0])
            found.append(read_document(own, within, self.vision))
        if unread:
            raise ValueError(
                f"it has {len(media)} pictures and videos, and tokens of {len(media) - len(unread)} of them"
            )
        return found


def fitted(frames: int, height: int, width: int, vision: VisionConfig) -> tuple[int, int]:
    """The height and width to which frames are resized: multiples of a square of patches, with a bounded product.

    The bounds of pixels hold for one frame. A side is rounded to the nearest multiple, a half to the even one. If the
    product then is beyond a bound, both sides are scaled to meet it. Raises ValueError for a frame that is more than
    200 times as long as it is wide.
    """
    side = vision.patch_size * vision.merge_size
    if max(height, width) > LONGEST_RATIO * min(height, width):
        raise ValueError(
            f"a picture of {width} x {height} pixels is more than {LONGEST_RATIO} times as long as it is wide"
        )
    rows, columns = round(height / side) * side, round(width / side) * side
    if rows * columns > vision.max_pixels:
        factor = math.sqrt(height * width / vision.max_pixels)
        return tuple(max(side, math.floor(one / factor / side) * side) for one in (height, width))  # type: ignore[return-value]
    if rows * columns < vision.min_pixels:
        factor = math.sqrt(vision.min_pixels / (height * width))
        return tuple(math.ceil(one * factor / side) * side for one in (height, width))  # type: ignore[return-value]
    return rows, columns


def cut(frames: "Tensor", vision: VisionConfig) -> "Tensor":
    """Frames [F, H, W, 3] as patches [P, C] in the published order; the last frame is repeated to fill a patch."""
    import torch

    if missing := -len(frames) % vision.patch_frames:
        frames = torch.cat((frames, frames[-1:].expand(missing, -1, -1, -1)))
    merge, side = vision.merge_size, vision.patch_size
    parts = frames.view(
        -1,
        vision.patch_frames,
        frames.shape[1] // (merge * side),
        merge,
        side,
        frames.shape[2] // (merge * side),
        merge,
        side,
        frames.shape[3],
    )  # frame of patches, picture in it, square row, patch row, pixel row, square column, patch column, pixel, colour
    return parts.permute(0, 2, 5, 3, 6, 8, 1, 4, 7).reshape(-1, vision.patch_width)
