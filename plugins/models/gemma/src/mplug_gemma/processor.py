"""From pictures to the entries of the tower. H rows and W columns of pixels, P patches.

The module imports without torch.
"""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from mplug_gemma.vision import CONTEXT, VisionConfig
from mplug_streams import Medium

if TYPE_CHECKING:
    from torch import Tensor

    from mplug import MicroBatch
    from mplug_streams import Seen


BEFORE = "Here is the original image \n\n"
BEHIND = "\n\n and here are some crops to help you see better \n\n"
ACROSS = "\n\n \n\n"
"""The library's texts before and behind a picture with crops, and between two crops."""


class VisionProcessor:
    """Resizes pictures to a square, cuts them into patches, and finds their places among the tokens.

    With `pan_and_scan`, the medium of a long picture is the picture and its crops, with texts around them.
    """

    def __init__(self, vision: VisionConfig) -> None:
        self.vision = vision
        self.placeholders = frozenset({vision.image_token})
        self.entries = tuple(CONTEXT)

    def prepare(self, content: "Tensor", num_pictures: int = 1) -> Medium:
        """The patches of a picture [1, H, W, 3] and of its crops, and the tokens that stand for them."""
        import torch

        from mplug_nn.pictures import resize_frames, standardized

        vision, side = self.vision, self.vision.image_size
        if len(content) != 1:
            raise ValueError(f"this model sees single pictures, and got a video of {len(content)} frames")
        squares = [resize_frames(one, side, side, "bilinear") for one in (content, *crops_of(content, vision))]
        patches = torch.cat([cut(standardized(one, vision.pixel_mean, vision.pixel_std), vision) for one in squares])
        around = () if vision.blank_line_token is None else (vision.blank_line_token,)
        inside = (vision.start_token, *(vision.image_token,) * vision.tokens_per_image, vision.end_token)
        mark = (vision.start_token,)
        if len(squares) == 1:
            return Medium((*around, *inside, *around), len(patches), patches, mark)
        between = ((number * len(inside), ACROSS) for number in range(2, len(squares)))
        texts = ((0, BEFORE), (len(inside), BEHIND), *between)
        return Medium((*inside * len(squares), *around), len(patches), patches, mark, texts)

    def entries_of(
        self, tokens: "Tensor", media: Sequence[Sequence[Medium]], document_lengths: "Tensor | None" = None
    ) -> "Mapping[str, Tensor]":
        """The entries of a micro batch; without a picture in it, they hold one square of zeros."""
        from mplug_gemma.stream import micro_batch_entries

        size = self.vision.num_patches
        patches = [[one for medium in own for one in medium.values.split(size)] for own in media]
        return micro_batch_entries(tokens, patches, self.vision, document_lengths)

    def contents_of(self, batch: "MicroBatch") -> "list[list[Seen]]":
        """The pictures of each sample, restored from the patches of a micro batch."""
        from mplug_gemma.restoring import contents_of

        return contents_of(batch, self.vision)


def crops_of(content: "Tensor", vision: VisionConfig) -> "list[Tensor]":
    """The crops of a picture [1, H, W, 3], from left to right or from top to bottom; none of one that is not long."""
    options, sizes = vision.pan_and_scan, content.shape[1:3]
    longer, shorter = max(sizes), min(sizes)
    if options is None or longer / shorter < options.min_ratio:
        return []
    number = min(math.floor(longer / shorter + 0.5), longer // options.min_crop_size)
    number = min(max(number, 2), options.max_crops)
    length = math.ceil(longer / number)
    if min(length, shorter) < options.min_crop_size:
        return []
    dim = 2 if sizes[1] >= sizes[0] else 1
    return list(content.split(length, dim=dim))


def cut(frames: "Tensor", vision: VisionConfig) -> "Tensor":
    """A picture [1, H, W, 3] as patches [P, C], row by row; the numbers of a patch are ordered by colour, then row."""
    number, side = vision.patches_per_side, vision.patch_size
    parts = frames[0].view(number, side, number, side, -1)  # patch row, pixel row, patch column, pixel column, colour
    return parts.permute(0, 2, 4, 1, 3).reshape(number**2, vision.patch_width)
