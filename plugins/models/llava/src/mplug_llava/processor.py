"""From pictures to the entries of the tower. H rows and W columns of pixels, P rows of the tower, C numbers of a patch.

The module imports without torch.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from mplug import Medium
from mplug_llava.config import LlavaConfig
from mplug_llava.vision import CONTEXT, VisionConfig

if TYPE_CHECKING:
    from torch import Tensor

LONGEST_RATIO = 200
"""Maximum ratio of the sides of a picture that is cropped: scaled, it would fill the memory."""


class PictureProcessor:
    """Makes a square of a picture, as CLIP or SigLIP do, and cuts it into patches. A medium is one picture."""

    def __init__(self, config: LlavaConfig) -> None:
        self.vision, self.token = config.vision, config.image_token
        self.placeholders = frozenset({self.token})
        self.entries = tuple(CONTEXT)

    def prepare(self, content: "Tensor", num_pictures: int = 1) -> Medium:
        """The patches of a picture [1, H, W, 3], and the tokens that stand for them."""
        vision = self.vision
        if len(content) != 1:
            raise ValueError(f"this model takes pictures, and a video of {len(content)} frames is none")
        rows = cut(squared(content, vision)[0], vision)
        return Medium((self.token,) * len(vision.seen_rows), vision.num_rows, rows, mark=(self.token,))

    def entries_of(
        self, tokens: "Tensor", media: Sequence[Sequence[Medium]], document_lengths: "Tensor | None" = None
    ) -> "Mapping[str, Tensor]":
        """The entries of a micro batch; without a picture in it, they hold one row of zeros that no token refers to."""
        import torch

        vision, is_seen = self.vision, tokens == self.token
        pictures = [medium.values for own in media for medium in own]
        for number, (own, row) in enumerate(zip(media, is_seen, strict=True)):
            found, needed = int(row.sum()), sum(len(medium.tokens) for medium in own)
            if found != needed:
                raise ValueError(
                    f"sample {number} of the micro batch: its {len(own)} pictures have {needed} tokens, and the text "
                    f"has {found} tokens {self.token}"
                )
        patches = torch.cat(pictures) if pictures else torch.zeros(1, vision.patch_width)
        places = torch.arange(vision.num_rows).repeat(len(pictures)) if pictures else torch.zeros(1, dtype=torch.int64)
        starts = torch.arange(len(pictures)) * vision.num_rows
        seen = (starts[:, None] + torch.tensor([*vision.seen_rows])).flatten()
        rows = torch.full_like(tokens, -1)
        rows[is_seen] = seen
        return {
            "patches": patches[None],
            "patch_places": places[None],
            "patch_lengths": torch.tensor([vision.num_rows] * len(pictures) or [1])[None],
            "vision_rows": rows,
        }


def squared(content: "Tensor", vision: VisionConfig) -> "Tensor":
    """A picture [1, H, W, 3] as a square of the tower's side [1, side, side, 3], standardised.

    It is stretched, or its shorter side is scaled to that of the square, and the middle is cropped. Raises ValueError
    for a picture to be cropped that is more than 200 times as long as it is wide.
    """
    from mplug_nn.pictures import resize_frames, standardized

    side, (height, width) = vision.image_size, content.shape[1:3]
    size = (side, side)
    if vision.fit == "crop":
        if max(height, width) > LONGEST_RATIO * min(height, width):
            raise ValueError(
                f"a picture of {width} x {height} pixels is more than {LONGEST_RATIO} times as long as it is wide"
            )
        scaled = int(side * max(height, width) / min(height, width))
        size = (scaled, side) if width <= height else (side, scaled)
    top, left = (size[0] - side) // 2, (size[1] - side) // 2
    square = resize_frames(content, *size)[:, top : top + side, left : left + side]
    return standardized(square, vision.pixel_mean, vision.pixel_std)


def cut(picture: "Tensor", vision: VisionConfig) -> "Tensor":
    """A square [side, side, 3] as rows of the tower [P, C]: a class row of zeros, if there is one, then the patches."""
    import torch

    side, number = vision.patch_size, vision.side
    whole = picture[: number * side, : number * side]
    parts = whole.reshape(number, side, number, side, -1).permute(0, 2, 4, 1, 3).reshape(number**2, -1)
    return torch.cat((parts.new_zeros(int(vision.class_row), parts.shape[1]), parts))
