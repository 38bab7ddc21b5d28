"""From pictures and videos to the entries of the tower. F frames, H rows and W columns of pixels, P patches.

The module imports without torch.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from mplug_qwen_vl.vision import VisionConfig
from mplug_streams import Medium

if TYPE_CHECKING:
    from torch import Tensor

    from mplug import MicroBatch
    from mplug_qwen_vl.stream import Document, Grid
    from mplug_streams import Seen

LONGEST_RATIO = 200
"""Maximum ratio of the sides of a picture."""


class VisionProcessor:
    """Resizes pictures to whole squares of patches, cuts them into patches, and finds their places among the tokens.

    With `vision.tokens_per_second`, times of videos are positions. Without it, they are texts between the frames.
    """

    def __init__(self, vision: VisionConfig) -> None:
        self.vision = vision
        self.placeholders = frozenset({vision.image_token, vision.video_token})
        windows = () if vision.window_size is None else ("window_lengths",)
        self.entries = ("patches", "patch_places", "patch_lengths", *windows, "vision_rows", "coordinates")

    def prepare(self, content: "Tensor", num_pictures: int = 1) -> Medium:
        """The patches of a picture [1, H, W, 3], and the tokens that stand for it."""
        vision = self.vision
        if len(content) != 1:
            raise ValueError(f"a picture has one frame, and this content has {len(content)}")
        bounds = (vision.min_pixels, vision.max_pixels)
        grid, patches = self._patches(content, fitted(content.shape[1], content.shape[2], vision, bounds))
        return self._medium(vision.image_token, grid, patches, self._run(vision.image_token, grid))

    def prepare_video(self, content: "Tensor", rate: float, encode: "Callable[[str], Sequence[int]]") -> Medium:
        """The patches of the frames [F, H, W, 3] of a video, of which a second has `rate`, and its tokens.

        A model with times in the text has the text "<1.2 seconds>" before the frames of a patch. Its time is the mean
        of the times of the first and the last of these frames.
        """
        vision, number = self.vision, len(content)
        size = (content.shape[1], content.shape[2])
        if vision.tokens_per_second is not None:
            height, width = fitted(*size, vision, vision.video_bounds)
        else:
            height, width = fitted_video(number, *size, vision)
        grid, patches = self._patches(content, (height, width))
        grid = grid._replace(seconds=vision.patch_frames / rate)
        if vision.tokens_per_second is not None:
            tokens = self._run(vision.video_token, grid)
        else:
            frame = self._run(vision.video_token, grid._replace(frames=1))
            texts = (encode(f"<{time:.1f} seconds>") for time in times_of(number, rate, vision.patch_frames))
            within = (token for text in texts for token in (*text, *frame))
            tokens = (vision.start_token, *within, vision.end_token)
        return self._medium(vision.video_token, grid, patches, tokens)

    def _patches(self, content: "Tensor", size: tuple[int, int]) -> "tuple[Grid, Tensor]":
        """The grid and the patches of frames that are resized to a height and a width."""
        from mplug_nn.pictures import resize_frames, standardized
        from mplug_qwen_vl.stream import Grid

        vision, (height, width) = self.vision, size
        frames = standardized(resize_frames(content, height, width), vision.pixel_mean, vision.pixel_std)
        side = vision.patch_size
        return Grid(-(-len(content) // vision.patch_frames), height // side, width // side), cut(frames, vision)

    def _run(self, token: int, grid: "Grid") -> tuple[int, ...]:
        """A placeholder for each square of a grid, between the tokens around an image."""
        number = grid.num_patches // self.vision.merge_size**2
        return (self.vision.start_token, *[token] * number, self.vision.end_token)

    def _medium(self, token: int, grid: "Grid", patches: "Tensor", tokens: tuple[int, ...]) -> Medium:
        mark = (self.vision.start_token, token, self.vision.end_token)
        return Medium(tokens, grid.num_patches, (grid, patches), mark=mark)

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


def fitted(height: int, width: int, vision: VisionConfig, bounds: tuple[int, int]) -> tuple[int, int]:
    """The height and width to which a frame is resized: multiples of a square of patches, with a bounded product.

    A side is rounded to the nearest multiple, a half to the even one. If the product then is beyond a bound, both sides
    are scaled to meet it. Raises ValueError for a frame that is more than 200 times as long as it is wide.
    """
    return _fitted(height, width, 1, 1, vision, bounds)


def fitted_video(frames: int, height: int, width: int, vision: VisionConfig) -> tuple[int, int]:
    """The height and width of the frames of a video whose bounds hold for all frames together.

    A frame that is smaller than a square of patches is scaled to it first. The bounds hold for whole patches, whose
    number is rounded, a half to the even one. Raises ValueError for a video that is shorter than a patch.
    """
    side, of_patch = vision.patch_size * vision.merge_size, vision.patch_frames
    if frames < of_patch:
        raise ValueError(f"a video of {frames} frames is shorter than a patch, which has {of_patch}; use an image")
    if min(height, width) < side:
        scale = max(side / height, side / width)
        height, width = int(height * scale), int(width * scale)
    counted = round(frames / of_patch) * of_patch
    return _fitted(height, width, counted, frames, vision, vision.video_bounds)


def _fitted(
    height: int, width: int, counted: int, frames: int, vision: VisionConfig, bounds: tuple[int, int]
) -> tuple[int, int]:
    """The fitted sides of `frames` frames, of which `counted` are compared with the bounds."""
    side, (least, most) = vision.patch_size * vision.merge_size, bounds
    if max(height, width) > LONGEST_RATIO * min(height, width):
        raise ValueError(
            f"a picture of {width} x {height} pixels is more than {LONGEST_RATIO} times as long as it is wide"
        )
    rows, columns = round(height / side) * side, round(width / side) * side
    if counted * rows * columns > most:
        factor = math.sqrt(frames * height * width / most)
        return tuple(max(side, math.floor(one / factor / side) * side) for one in (height, width))  # type: ignore[return-value]
    if counted * rows * columns < least:
        factor = math.sqrt(least / (frames * height * width))
        return tuple(math.ceil(one * factor / side) * side for one in (height, width))  # type: ignore[return-value]
    return rows, columns


def times_of(frames: int, rate: float, of_patch: int) -> list[float]:
    """The time of each patch of a video in seconds; the last frame is repeated to fill a patch."""
    times = [number / rate for number in range(frames)]
    times += [times[-1]] * (-frames % of_patch)
    return [(times[first] + times[first + of_patch - 1]) / 2 for first in range(0, len(times), of_patch)]


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
