"""The section 'model.tiling': pictures as tiles (LLaVA-OneVision, arXiv 2408.03326). Imports no torch."""

import math
from collections.abc import Sequence
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

Size = tuple[int, int]
"""Height and width."""
Colours = tuple[float, float, float]
SIDES = range(384, 2305, 384)
OF_VIDEOS = frozenset({"video_mean", "video_std"})
"""Fields for frames of videos before they are patches: models that differ only in these compute the same."""


class TilingConfig(BaseModel):
    """How a picture is divided into squares of the tower, and how the rows of its tiles become rows of the text."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    resolutions: tuple[tuple[PositiveInt, PositiveInt], ...] = Field(
        tuple((height, width) for height in SIDES for width in SIDES),
        description="heights and widths in pixels, multiples of vision.image_size, one of which a picture is fitted to",
    )
    max_tiles: PositiveInt = Field(
        9, description="tiles whose number of rows a picture has at most; those of a larger one are resampled"
    )
    video_token: NonNegativeInt = Field(151647, description="token in whose place a row of a video stands")
    video_mean: Colours | None = Field(None, description="means of the colours of videos; null: vision.pixel_mean")
    video_std: tuple[PositiveFloat, PositiveFloat, PositiveFloat] | None = Field(
        None, description="standard deviations of the colours of videos; null: vision.pixel_std"
    )

    @model_validator(mode="after")
    def _has_resolutions(self) -> Self:
        if not self.resolutions:
            raise ValueError("tiling: resolutions needs at least one height and width")
        return self

    def computes_like(self, other: "TilingConfig") -> bool:
        """Whether the same patches become the same rows of the text."""
        return self.model_dump(exclude=OF_VIDEOS) == other.model_dump(exclude=OF_VIDEOS)

    def colours_of_videos(self, mean: Colours, std: Colours) -> tuple[Colours, Colours]:
        """The means and standard deviations of the colours of videos, where those of pictures are `mean` and `std`."""
        return self.video_mean or mean, self.video_std or std


def best_resolution(height: int, width: int, resolutions: Sequence[Size]) -> Size:
    """The resolution in which most pixels of a picture are left after fitting; of several, the smallest waste."""

    def worth(resolution: Size) -> tuple[int, int]:
        scale = min(resolution[1] / width, resolution[0] / height)
        used = min(int(width * scale) * int(height * scale), height * width)
        return used, used - resolution[0] * resolution[1]

    return max(resolutions, key=worth)


def fitted_size(height: int, width: int, resolution: Size) -> Size:
    """The size of a picture that is scaled to touch two borders of a resolution."""
    by_height, by_width = resolution[0] / height, resolution[1] / width
    if by_width < by_height:
        return min(math.ceil(height * by_width), resolution[0]), resolution[1]
    return resolution[0], min(math.ceil(width * by_height), resolution[1])


def borders(height: int, width: int, rows: int, columns: int) -> Size:
    """The rows above and the columns left of a picture in a grid of tiles; as many are below and to its right.

    The picture has the ratio of `height` to `width`, and touches two borders of the grid.
    """
    if width / height > columns / rows:
        return (rows - int(round(height * (columns / width), 7))) // 2, 0
    return 0, (columns - int(round(width * (rows / height), 7))) // 2


def resampled_size(rows: int, columns: int, side: int, max_tiles: int) -> Size:
    """The size to which rows of a picture are resampled; the same size if they are few enough.

    Raises ValueError if nothing would be left.
    """
    ratio = math.sqrt(rows * columns / (max_tiles * side**2))
    if ratio <= 1.1:
        return rows, columns
    found = int(rows // ratio), int(columns // ratio)
    if not all(found):
        raise ValueError(f"the {rows} x {columns} rows of its tiles cannot become {found[0]} x {found[1]}")
    return found
