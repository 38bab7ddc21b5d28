"""From tokens and the patches of pictures to the entries of a micro batch.

S tokens, P patches, k x k patches of a square, whose mean becomes one row of the decoder. Published patches are ordered
row by row of the picture. The tower's are ordered by square (row by row), and row by row in the square.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from mplug_gemma.vision import VisionConfig


def tower_order(patches_per_side: int, pool_side: int) -> Tensor:
    """For each patch of a picture in the order of the tower, its number in the published order: [P]."""
    squares = patches_per_side // pool_side
    numbers = torch.arange(patches_per_side**2).view(squares, pool_side, squares, pool_side)
    return numbers.transpose(1, 2).flatten()


def groups_of(tokens: Tensor, image_token: int) -> Tensor:
    """The group of each position: the number of the run of image tokens that it is in, or -1; tokens [B, S]."""
    is_image = tokens == image_token
    starts = is_image.clone()
    starts[:, 1:] &= ~is_image[:, :-1]
    return torch.where(is_image, starts.cumsum(dim=1) - 1, -1)


def rows_of(
    tokens: Tensor, numbers: Sequence[int], vision: VisionConfig, document_lengths: Tensor | None = None
) -> Tensor:
    """The row of the tower's output that stands in the place of each position, or -1: [B, S].

    `numbers` are those of the pictures of each sample. Raises ValueError if tokens and pictures do not fit.
    """
    rows, size, first = torch.full_like(tokens, -1), vision.tokens_per_image, 0
    for index, number in enumerate(numbers):
        places = (tokens[index] == vision.image_token).nonzero()[:, 0]
        if len(places) != number * size:
            raise ValueError(
                f"sample {index} of the micro batch: it has {number} pictures of {size} tokens, and {len(places)} "
                f"tokens that stand for pictures"
            )
        ends = None if document_lengths is None else document_lengths[index].cumsum(dim=0)
        for own in places.view(number, size):
            if own[-1] - own[0] != size - 1:
                raise ValueError(
                    f"sample {index} of the micro batch: the text has other tokens among the {size} of a picture from "
                    f"token {int(own[0])} on"
                )
            if ends is not None and len(torch.searchsorted(ends, own[[0, -1]], right=True).unique()) > 1:
                raise ValueError(
                    f"sample {index} of the micro batch: the picture from token {int(own[0])} on crosses the end of a "
                    f"document"
                )
        rows[index, places] = torch.arange(first, first + len(places))
        first += len(places)
    return rows


def micro_batch_entries(
    tokens: Tensor,
    patches: Sequence[Sequence[Tensor]],
    vision: VisionConfig,
    document_lengths: Tensor | None = None,
) -> dict[str, Tensor]:
    """The entries of images of a micro batch with these tokens [B, S] and the patches of each sample's pictures.

    The patches [P, C] of a picture are in the published order. A micro batch without a picture has one square of zeros,
    which no token sees. Raises ValueError if tokens and pictures do not fit.
    """
    rows = rows_of(tokens, [len(own) for own in patches], vision, document_lengths)
    side, pool = vision.patches_per_side, vision.pool_side
    pictures = [one for own in patches for one in own]
    for one in pictures:
        if one.shape != (vision.num_patches, vision.patch_width):
            raise ValueError(
                f"the patches of a picture have shape {tuple(one.shape)}, which must be "
                f"{(vision.num_patches, vision.patch_width)}"
            )
    if pictures:
        order = tower_order(side, pool)
        made, places, lengths = torch.cat([one[order] for one in pictures]), _places(side, pool), [side**2]
    else:
        made, places, lengths = torch.zeros(pool**2, vision.patch_width), _places(pool, pool), [pool**2]
    number = len(pictures) or 1
    return {
        "patches": made[None],
        "patch_places": places.repeat(number, 1)[None],
        "patch_lengths": torch.tensor(lengths * number)[None],
        "vision_rows": rows,
        "position_groups": groups_of(tokens, vision.image_token),
    }


def _places(side: int, pool: int) -> Tensor:
    """Row, column, rows and columns of each patch of a picture in the order of the tower: [P, 4]."""
    order = tower_order(side, pool)
    return torch.stack((order // side, order % side, *(torch.full_like(order, side),) * 2), dim=1)
