"""From the patches of a micro batch back to pictures: the inverse of the processor, for commands that show samples.

P patches of a picture, R of them along a side, side x side pixels of a patch.
"""

import torch
from torch import Tensor

from mplug import MicroBatch
from mplug_gemma.stream import tower_order
from mplug_gemma.vision import VisionConfig
from mplug_streams import Seen


def contents_of(batch: MicroBatch, vision: VisionConfig) -> list[list[Seen]]:
    """The pictures of each sample, as squares; each crop is one of them."""
    patches, found = batch["patches"][0], list[list[Seen]]()
    for rows in batch["vision_rows"]:
        positions = (rows >= 0).nonzero()[:, 0]
        numbers = rows[positions] // vision.tokens_per_image
        found.append(
            [
                Seen(tuple(positions[numbers == number].tolist()), _restored(patches, number, vision))
                for number in numbers.unique_consecutive().tolist()
            ]
        )
    return found


def _restored(patches: Tensor, number: int, vision: VisionConfig) -> Tensor:
    """The colours of a picture [1, H, W, 3], as uint8."""
    size, side, width = vision.num_patches, vision.patch_size, vision.patches_per_side
    own = patches.new_empty(size, vision.patch_width)
    own[tower_order(width, vision.pool_side)] = patches[number * size : (number + 1) * size]
    grid = own.float().view(width, width, vision.channels, side, side)
    colours = grid.permute(0, 3, 1, 4, 2).reshape(1, width * side, width * side, vision.channels)
    scaled = colours * torch.tensor(vision.pixel_std) + torch.tensor(vision.pixel_mean)
    return (scaled * 255).round().clamp(0, 255).to(torch.uint8)
