"""From pictures and videos to tiles, and to the rows of the text. H rows and W columns of pixels, T tokens of a medium.

A tile is a square of the tower and a segment of the stream. After the projector, the rows of a tile are a square of
cells. A token stands for the weighted sum of up to `CORNERS` cells, or for the end of a line.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mplug_llava.squares import cut
from mplug_llava.tiling import TilingConfig, best_resolution, borders, fitted_size, resampled_size
from mplug_llava.vision import CORNERS, VisionConfig
from mplug_nn.pictures import resize_frames, standardized


class Tiles(NamedTuple):
    """A prepared picture or video.

    `patches` [P, C] are the rows of the tower. `cells` and `shares` [T, CORNERS] say for each token which rows its own
    is the weighted sum of, counted from the medium's first one. The end of a line has no shares.
    """

    patches: Tensor
    cells: Tensor
    shares: Tensor


def tiles_of(content: Tensor, num_pictures: int, vision: VisionConfig, tiling: TilingConfig) -> Tiles:
    """The tiles of a picture [1, H, W, 3].

    A single picture is seen as a whole and by tiles in more detail. One of several pictures is filled up to a square.
    """
    side = vision.image_size
    if num_pictures > 1:
        squares = resize_frames(_filled(content, vision.pixel_mean), side, side)
        return _tiles(squares, [_plain(_cells(0, vision)), _line_ends(1)], vision)
    resolution = best_resolution(*content.shape[1:3], tiling.resolutions)
    squares = torch.cat((resize_frames(content, side, side), _divided(content, resolution, side)))
    detail = _lines(_visible(content, resolution, vision), vision.side, tiling.max_tiles)
    return _tiles(squares, [_plain(_cells(0, vision)), detail], vision)


def frames_of(content: Tensor, vision: VisionConfig, tiling: TilingConfig) -> Tiles:
    """The frames of a video [F, H, W, 3], at half the number of rows per side, and one end of a line."""
    seen = [_halved(number, vision) for number in range(len(content))]
    mean, std = tiling.colours_of_videos(vision.pixel_mean, vision.pixel_std)
    own = vision.model_copy(update={"pixel_mean": mean, "pixel_std": std})
    return _tiles(resize_frames(content, vision.image_size, vision.image_size), [*seen, _line_ends(1)], own)


def _tiles(squares: Tensor, seen: Sequence[tuple[Tensor, Tensor]], vision: VisionConfig) -> Tiles:
    """The patches of squares, and what their tokens see."""
    colours = standardized(squares, vision.pixel_mean, vision.pixel_std)
    patches = torch.cat([cut(square, vision) for square in colours])
    return Tiles(patches, torch.cat([cells for cells, _ in seen]), torch.cat([shares for _, shares in seen]))


def _filled(content: Tensor, mean: Sequence[float]) -> Tensor:
    """A picture [1, H, W, 3] in the middle of a square of the mean colour."""
    height, width = content.shape[1:3]
    side = max(height, width)
    square = torch.tensor([int(255 * one) for one in mean], dtype=torch.uint8).repeat(1, side, side, 1)
    top, left = (side - height) // 2, (side - width) // 2
    square[:, top : top + height, left : left + width] = content
    return square


def _divided(content: Tensor, resolution: tuple[int, int], side: int) -> Tensor:
    """A picture [1, H, W, 3], fitted to a resolution with black borders, as tiles [N, side, side, 3], row by row."""
    height, width = fitted_size(content.shape[1], content.shape[2], resolution)
    whole = content.new_zeros(1, *resolution, content.shape[3])
    top, left = (resolution[0] - height) // 2, (resolution[1] - width) // 2
    whole[:, top : top + height, left : left + width] = resize_frames(content, height, width)
    parts = whole.view(resolution[0] // side, side, resolution[1] // side, side, -1)
    return parts.transpose(1, 2).reshape(-1, side, side, content.shape[3])


def _cells(tile: int, vision: VisionConfig) -> Tensor:
    """The numbers of the rows of a tile, as a square [side, side]."""
    first = tile * vision.num_rows + vision.seen_rows.start
    return torch.arange(first, first + vision.side**2).view(vision.side, vision.side)


def _visible(content: Tensor, resolution: tuple[int, int], vision: VisionConfig) -> Tensor:
    """The numbers of the rows of all tiles behind the first, as a grid without the borders around the picture."""
    high, wide = (size // vision.image_size for size in resolution)
    lines = [torch.cat([_cells(1 + row * wide + one, vision) for one in range(wide)], dim=1) for row in range(high)]
    grid = torch.cat(lines)
    top, left = borders(content.shape[1], content.shape[2], *grid.shape)
    return grid[top : len(grid) - top, left : grid.shape[1] - left]


def _plain(cells: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens that stand for one cell each."""
    shares = torch.zeros(cells.numel(), CORNERS, dtype=torch.float64)
    shares[:, 0] = 1
    return cells.reshape(-1, 1).expand(-1, CORNERS), shares


def _line_ends(number: int) -> tuple[Tensor, Tensor]:
    """Tokens that stand for the end of a line; they name the medium's first row, which has no share."""
    return torch.zeros(number, CORNERS, dtype=torch.int64), torch.zeros(number, CORNERS, dtype=torch.float64)


def _lines(grid: Tensor, side: int, max_tiles: int) -> tuple[Tensor, Tensor]:
    """The tokens of a grid of cells, line by line, each with its end; cells of a large grid are resampled."""
    size = resampled_size(*grid.shape, side, max_tiles)
    cells, shares = _plain(grid) if size == tuple(grid.shape) else _resampled(grid, *size)
    ends = _line_ends(size[0])
    pairs = ((x.view(*size, CORNERS), end[:, None]) for x, end in zip((cells, shares), ends, strict=True))
    joined = [torch.cat(pair, dim=1).flatten(0, 1) for pair in pairs]
    return joined[0], joined[1]


def _halved(frame: int, vision: VisionConfig) -> tuple[Tensor, Tensor]:
    """The tokens of a frame of a video: its cells at half the size."""
    size = -(-vision.side // 2)
    return _resampled(_cells(frame, vision), size, size)


def _resampled(grid: Tensor, height: int, width: int) -> tuple[Tensor, Tensor]:
    """A grid of cells at another size, by linear interpolation along lines and columns, with the borders aligned."""
    rows, of_row = _between(grid.shape[0], height)
    columns, of_column = _between(grid.shape[1], width)
    cells = [grid[row][:, column] for row in rows for column in columns]
    shares = [row[:, None] * column for row in of_row for column in of_column]
    return torch.stack(cells, dim=-1).view(-1, CORNERS), torch.stack(shares, dim=-1).view(-1, CORNERS)


def _between(size: int, number: int) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """For each of `number` points that divide `size` cells evenly: the cells before and after it, and their shares."""
    exact = ((torch.arange(number, dtype=torch.float64) + 0.5) * (size / number) - 0.5).clamp(min=0)
    before = exact.floor().to(torch.int64)
    after = exact - before
    return (before, (before + 1).clamp(max=size - 1)), (1 - after, after)
