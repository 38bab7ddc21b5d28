"""From the patches of a micro batch back to pictures: the inverse of the processors, for commands that show samples.

S tokens of a sample, P patches, H rows and W columns of pixels.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from mplug import MicroBatch
from mplug_llava.config import LlavaConfig
from mplug_llava.vision import VisionConfig
from mplug_streams import Seen


def contents_of(batch: MicroBatch, config: LlavaConfig) -> list[list[Seen]]:
    """The media of each sample. A picture with tiles is put together of those that show it, without black borders."""
    patches = batch["patches"][0]
    found = list[list[Seen]]()
    for number, (tokens, rows) in enumerate(zip(batch["tokens"], batch["vision_rows"], strict=True)):
        if config.tiling is None:
            found.append(list(_squares(patches, rows, config.vision)))
        else:
            found.append(list(_tiled(patches, tokens, rows, batch["vision_shares"][number], config)))
    return found


def _squares(patches: Tensor, rows: Tensor, vision: VisionConfig) -> Iterator[Seen]:
    """The pictures of a sample, each of one square."""
    positions = (rows >= 0).nonzero()[:, 0]
    numbers = rows[positions] // vision.num_rows
    for number in numbers.unique_consecutive().tolist():
        yield Seen(tuple(positions[numbers == number].tolist()), _restored(patches, number, vision)[None])


def _tiled(patches: Tensor, tokens: Tensor, rows: Tensor, shares: Tensor, config: LlavaConfig) -> Iterator[Seen]:
    """The pictures and videos of a sample. The end of a line names the first row of its medium."""
    vision, tiling = config.vision, config.tiling
    assert tiling is not None
    positions, size = (rows[:, 0] >= 0).nonzero()[:, 0], vision.side**2
    is_end = (shares == 0).all(dim=-1)
    while len(positions):
        first = int(rows[positions[0], 0]) - vision.seen_rows.start
        ends = (is_end[positions] & (rows[positions, 0] == first)).nonzero()[:, 0]
        own = positions[: int(ends[-1]) + 1 if len(ends) else size]
        positions = positions[len(own) :]
        square = first // vision.num_rows
        if tokens[own[0]] == tiling.video_token:
            frames = (len(own) - 1) // (-(-vision.side // 2)) ** 2
            mean, std = tiling.colours_of_videos(vision.pixel_mean, vision.pixel_std)
            shown = vision.model_copy(update={"pixel_mean": mean, "pixel_std": std})
            content = torch.stack([_restored(patches, square + frame, shown) for frame in range(frames)])
        elif len(ends) > 1 and ends[0] > size:
            lines = rows[own[size:]].view(len(ends), -1, rows.shape[1])[:, :-1]  # [lines, cells, CORNERS]
            content = _joined(patches, lines, vision)[None]
        else:
            content = _restored(patches, square, vision)[None]
        yield Seen(tuple(own.tolist()), content)


def _joined(patches: Tensor, lines: Tensor, vision: VisionConfig) -> Tensor:
    """The tiles to which the lines of cells refer, as one picture from the first cell to the last [H, W, 3]."""
    across = (lines[0] // vision.num_rows).unique().tolist()
    down = (lines[:, 0] // vision.num_rows).unique().tolist()
    tiles = [[_restored(patches, row + tile - across[0], vision) for tile in across] for row in down]
    picture = torch.cat([torch.cat(line, dim=1) for line in tiles])
    begin, end = (int(one) % vision.num_rows - vision.seen_rows.start for one in (lines[0, 0, 0], lines[-1, -1, -1]))
    side, width = vision.patch_size, vision.side
    bottom, right = ((len(parts) - 1) * width for parts in (down, across))
    top, left = begin // width, begin % width
    return picture[top * side : (bottom + end // width + 1) * side, left * side : (right + end % width + 1) * side]


def _restored(patches: Tensor, number: int, vision: VisionConfig) -> Tensor:
    """The colours of a square [H, W, 3], as uint8, without pixels beyond the last whole patch."""
    begin, side, width = number * vision.num_rows + int(vision.class_row), vision.patch_size, vision.side
    own = patches[begin : begin + width**2].float().view(width, width, vision.channels, side, side)
    colours = own.permute(0, 3, 1, 4, 2).reshape(width * side, width * side, vision.channels)
    scaled = colours * torch.tensor(vision.pixel_std) + torch.tensor(vision.pixel_mean)
    return (scaled * 255).round().clamp(0, 255).to(torch.uint8)
