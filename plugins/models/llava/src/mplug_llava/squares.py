"""Pictures as squares of the tower, and squares as its rows. H rows and W columns of pixels, C numbers of a patch."""

import torch
from torch import Tensor

from mplug_llava.vision import VisionConfig
from mplug_nn.pictures import resize_frames, standardized

LONGEST_RATIO = 200
"""Maximum ratio of the sides of a picture that is cropped: scaled, it would fill the memory."""


def squared(content: Tensor, vision: VisionConfig) -> Tensor:
    """A picture [1, H, W, 3] as a square of the tower's side [1, side, side, 3], standardised.

    It is stretched, or its shorter side is scaled to that of the square, and the middle is cropped. Raises ValueError
    for a picture to be cropped that is more than 200 times as long as it is wide.
    """
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


def cut(picture: Tensor, vision: VisionConfig) -> Tensor:
    """A square [side, side, 3] as rows of the tower [P, C]: a class row of zeros, if there is one, then the patches."""
    side, number = vision.patch_size, vision.side
    whole = picture[: number * side, : number * side]
    parts = whole.reshape(number, side, number, side, -1).permute(0, 2, 4, 1, 3).reshape(number**2, -1)
    return torch.cat((parts.new_zeros(int(vision.class_row), parts.shape[1]), parts))
