"""From tokens and the grids of images to the entries of a micro batch.

S tokens, P patches, m x m patches of a square, which becomes one row of the decoder. Published patches are ordered by
frame, by square (row by row), and by patch in the square. The tower's are ordered by frame, by window, by square in the
window, and by patch in the square. Without windows, both orders are the same.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mplug_qwen_vl.vision import VisionConfig


class Grid(NamedTuple):
    """The patches of an image or a video: frames (of `patch_frames` pictures each), rows and columns.

    `seconds` is the time between two frames of a video.
    """

    frames: int
    rows: int
    columns: int
    seconds: float = 1.0

    @property
    def num_patches(self) -> int:
        """The patches of all frames."""
        return self.frames * self.rows * self.columns


class Document(NamedTuple):
    """What the positions of a text see.

    `coordinates` [S, 3] are time, row and column of each position. `rows` [S] is the number of the tower's row that
    stands in its place, counted from the first grid of the text; -1: none. `grids` are those of the text, in order.
    """

    coordinates: Tensor
    rows: Tensor
    grids: tuple[Grid, ...]


def read_document(tokens: Sequence[int], grids: Sequence[Grid], vision: VisionConfig) -> Document:
    """The document of tokens, in which images and videos have these grids, in the order in which they occur.

    An image has one token for each square, consecutively. A video has the tokens of all frames consecutively if the
    tower has `tokens_per_second`, otherwise those of each frame, with text between frames. ValueError if tokens and
    grids do not fit.
    """
    unread = _runs(grids, vision)
    marks = (vision.image_token, vision.video_token)
    coordinates, rows = list[Tensor](), list[Tensor]()
    start, index, offset = 0, 0, 0
    while index < len(tokens):
        end = next((place for place in range(index, len(tokens)) if tokens[place] in marks), len(tokens))
        if end > index:
            coordinates.append(torch.arange(start, start + end - index)[:, None].expand(-1, 3))
            rows.append(torch.full((end - index,), -1))
            start, index = start + end - index, end
            continue
        run = next(unread, None)
        if run is None:
            raise ValueError(f"token {index} stands for an image or a video, of which there are only {len(grids)}")
        size = run.num_patches // vision.merge_size**2
        _refuse_other_tokens(tokens, index, size, run)
        is_timed = tokens[index] == vision.video_token and vision.tokens_per_second is not None
        coordinates.append(start + _places_in_time(run, vision, is_timed))
        rows.append(offset + _rows_of(run, vision))
        start += max(run.rows, run.columns) // vision.merge_size
        index, offset = index + size, offset + size
    if next(unread, None) is not None:
        raise ValueError(f"there are {len(grids)} images and videos, and the text has tokens for fewer")
    if not coordinates:
        return Document(torch.zeros(0, 3, dtype=torch.int64), torch.zeros(0, dtype=torch.int64), tuple(grids))
    return Document(torch.cat(coordinates), torch.cat(rows), tuple(grids))


def _refuse_other_tokens(tokens: Sequence[int], index: int, size: int, run: Grid) -> None:
    """Raise ValueError unless the tokens of an image or of a frame are there, and are equal."""
    found = tokens[index : index + size]
    if len(found) < size or any(one != tokens[index] for one in found):
        raise ValueError(
            f"an image or a video of {run.frames} x {run.rows} x {run.columns} patches has {size} tokens, but the text "
            f"has others among the {size} from token {index} on"
        )


def _runs(grids: Sequence[Grid], vision: VisionConfig) -> Iterator[Grid]:
    """What occurs as consecutive tokens: whole images and videos, or each frame of its own."""
    for grid in grids:
        if min(grid[:3]) < 1 or grid.rows % vision.merge_size or grid.columns % vision.merge_size:
            raise ValueError(
                f"an image of {grid.rows} x {grid.columns} patches cannot be divided into squares of "
                f"{vision.merge_size} x {vision.merge_size}"
            )
        if vision.tokens_per_second is None:
            yield from [grid._replace(frames=1)] * grid.frames
        else:
            yield grid


def _places_in_time(grid: Grid, vision: VisionConfig, is_timed: bool) -> Tensor:
    """Time, row and column of each square from the first one on, row by row: [n, 3]."""
    step = (vision.tokens_per_second or 1) * grid.seconds if is_timed else 1
    times = (torch.arange(grid.frames) * step).to(torch.int64)
    rows, columns = (torch.arange(size // vision.merge_size) for size in (grid.rows, grid.columns))
    return torch.cartesian_prod(times, rows, columns).view(-1, 3)


def _rows_of(grid: Grid, vision: VisionConfig) -> Tensor:
    """The number of the tower's row of each square, row by row: [n]."""
    order, _ = _windows(grid, vision)
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order))
    return (torch.arange(grid.frames)[:, None] * len(order) + place).flatten()


def _windows(grid: Grid, vision: VisionConfig) -> tuple[Tensor, list[int]]:
    """The squares of a frame (numbered row by row) in the order of the tower, and the squares of each window."""
    rows, columns = grid.rows // vision.merge_size, grid.columns // vision.merge_size
    squares = torch.arange(rows * columns).view(rows, columns)
    side = vision.window_side
    if not side:
        return squares.flatten(), [rows * columns]
    found = [window.flatten() for band in squares.split(side) for window in band.split(side, dim=1)]
    return torch.cat(found), [len(window) for window in found]


def tower_order(grid: Grid, vision: VisionConfig) -> Tensor:
    """For each patch in the order of the tower, its number in the published order: [P]."""
    squares, _ = _windows(grid, vision)
    number = vision.merge_size**2
    patches = (squares[:, None] * number + torch.arange(number)).flatten()
    return (torch.arange(grid.frames)[:, None] * len(patches) + patches).flatten()


def _patch_places(grid: Grid, vision: VisionConfig) -> Tensor:
    """Row, column, rows and columns of each patch in the order of the tower: [P, 4]."""
    squares, _ = _windows(grid, vision)
    side, width = vision.merge_size, grid.columns // vision.merge_size
    first = torch.stack((squares // width, squares % width), dim=-1) * side
    places = (first[:, None] + torch.cartesian_prod(torch.arange(side), torch.arange(side)).view(-1, 2)).flatten(0, 1)
    sizes = torch.tensor([grid.rows, grid.columns]).expand(len(places), 2)
    return torch.cat((places, sizes), dim=1).repeat(grid.frames, 1)


def micro_batch_entries(
    samples: Sequence[Sequence[Document]],
    length: int,
    vision: VisionConfig,
    patches: Sequence[Tensor],
    multiple: int = 1,
) -> dict[str, Tensor]:
    """The entries of images of a micro batch, for samples of `length` tokens that hold these documents.

    `patches` are those of every grid in order, in the published order: [P_i, C]. The number of patches is padded to a
    multiple of `multiple` squares, and is at least that: padding patches are zeros in a frame of their own, and no
    token sees them. Tokens behind the last document of a sample see nothing.
    """
    grids = [grid for sample in samples for document in sample for grid in document.grids]
    for grid, given in zip(grids, patches, strict=True):
        if given.shape != (grid.num_patches, vision.patch_width):
            raise ValueError(
                f"the patches of an image of {grid[:3]} have shape {tuple(given.shape)}, which must be "
                f"{(grid.num_patches, vision.patch_width)}"
            )
    number = vision.merge_size**2
    squares = sum(grid.num_patches for grid in grids) // number
    missing = -squares % multiple or (0 if squares else multiple)
    ordered = [given[tower_order(grid, vision)] for grid, given in zip(grids, patches, strict=True)]
    if missing:
        grids = [*grids, Grid(1, vision.merge_size, missing * vision.merge_size)]
        dtype = patches[0].dtype if patches else torch.float32
        ordered.append(torch.zeros(missing * number, vision.patch_width, dtype=dtype))
    rows, coordinates = _of_tokens(samples, length, number)
    entries = {
        "patches": torch.cat(ordered)[None],
        "patch_places": torch.cat([_patch_places(grid, vision) for grid in grids])[None],
        "patch_lengths": torch.tensor([grid.rows * grid.columns for grid in grids for _ in range(grid.frames)])[None],
        "vision_rows": rows,
        "coordinates": coordinates,
    }
    if vision.window_size is not None:
        windows = [of_window * number for grid in grids for of_window in _windows(grid, vision)[1] * grid.frames]
        entries["window_lengths"] = torch.tensor(windows)[None]
    return entries


def _of_tokens(samples: Sequence[Sequence[Document]], length: int, number: int) -> tuple[Tensor, Tensor]:
    """`vision_rows` [B, S] and `coordinates` [B, S, 3], for squares of `number` patches."""
    rows = torch.full((len(samples), length), -1)
    coordinates = torch.zeros(len(samples), length, 3, dtype=torch.int64)
    offset = 0
    for row, sample in enumerate(samples):
        start = 0
        for document in sample:
            end = start + len(document.rows)
            if end > length:
                raise ValueError(f"the documents of a sample have more than {length} tokens")
            rows[row, start:end] = torch.where(document.rows < 0, -1, document.rows + offset)
            coordinates[row, start:end] = document.coordinates
            offset += sum(grid.num_patches for grid in document.grids) // number
            start = end
        coordinates[row, start:] = torch.arange(length - start)[:, None]
    return rows, coordinates
