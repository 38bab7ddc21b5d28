"""From pictures to the entries of the tower. H rows and W columns of pixels, P patches.

The module imports without torch.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from mplug import Medium
from mplug_gemma.vision import CONTEXT, VisionConfig

if TYPE_CHECKING:
    from torch import Tensor


class VisionProcessor:
    """Resizes pictures to a square, cuts them into patches, and finds their places among the tokens.

    It makes no further crops of a picture (the library's "pan and scan", which is off by default): they have a text
    around them, and the processor has no tokenizer.
    """

    def __init__(self, vision: VisionConfig) -> None:
        self.vision = vision
        self.placeholders = frozenset({vision.image_token})
        self.entries = tuple(CONTEXT)

    def prepare(self, content: "Tensor", num_pictures: int = 1) -> Medium:
        """The patches of a picture [1, H, W, 3], and the tokens that stand for it."""
        from mplug_nn.pictures import resize_frames, standardized

        vision, side = self.vision, self.vision.image_size
        if len(content) != 1:
            raise ValueError(f"this model sees single pictures, and got a video of {len(content)} frames")
        frames = resize_frames(content, side, side, "bilinear")
        patches = cut(standardized(frames, vision.pixel_mean, vision.pixel_std), vision)
        around = () if vision.blank_line_token is None else (vision.blank_line_token,)
        inside = (vision.start_token, *(vision.image_token,) * vision.tokens_per_image, vision.end_token)
        return Medium((*around, *inside, *around), len(patches), patches, mark=(vision.start_token,))

    def entries_of(
        self, tokens: "Tensor", media: Sequence[Sequence[Medium]], document_lengths: "Tensor | None" = None
    ) -> "Mapping[str, Tensor]":
        """The entries of a micro batch; without a picture in it, they hold one square of zeros."""
        from mplug_gemma.stream import micro_batch_entries

        patches = [[medium.values for medium in own] for own in media]
        return micro_batch_entries(tokens, patches, self.vision, document_lengths)


def cut(frames: "Tensor", vision: VisionConfig) -> "Tensor":
    """A picture [1, H, W, 3] as patches [P, C], row by row; the numbers of a patch are ordered by colour, then row."""
    number, side = vision.patches_per_side, vision.patch_size
    parts = frames[0].view(number, side, number, side, -1)  # patch row, pixel row, patch column, pixel column, colour
    return parts.permute(0, 2, 4, 1, 3).reshape(number**2, vision.patch_width)
