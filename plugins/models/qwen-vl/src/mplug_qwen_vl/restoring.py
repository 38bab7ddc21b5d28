"""From the patches of a micro batch back to pictures: the inverse of the processor, for commands that show samples.

P patches of a frame, R rows and C columns of patches, side x side pixels of a patch.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from mplug import MicroBatch
from mplug_qwen_vl.vision import VisionConfig
from mplug_streams import Seen


def contents_of(batch: MicroBatch, vision: VisionConfig) -> list[list[Seen]]:
    """The media of each sample: a picture of one frame, or the frames of a video whose tokens are consecutive."""
    ends = batch["patch_lengths"][0].cumsum(0)
    starts = ends - batch["patch_lengths"][0]
    found = list[list[Seen]]()
    for tokens, rows in zip(batch["tokens"], batch["vision_rows"], strict=True):
        frames = torch.searchsorted(ends // vision.merge_size**2, rows, right=True)  # of each token's row
        found.append([])
        for positions in _runs(tokens, rows, frames, vision):
            numbers = frames[positions].unique_consecutive().tolist()
            parts = [_restored(batch, slice(int(starts[one]), int(ends[one])), vision) for one in numbers]
            is_video = int(tokens[positions[0]]) == vision.video_token
            found[-1].append(Seen(tuple(positions), torch.cat(parts) if is_video else parts[0][:1]))
    return found


def _runs(tokens: Tensor, rows: Tensor, frames: Tensor, vision: VisionConfig) -> Iterator[list[int]]:
    """The positions of each medium of a sample: consecutive ones; those of a picture have rows of one frame."""
    run = list[int]()
    for position in (rows >= 0).nonzero().flatten().tolist():
        if run:
            is_video = int(tokens[position]) == vision.video_token
            continues = position == run[-1] + 1 and bool(tokens[position] == tokens[run[-1]])
            if not continues or not (is_video or frames[position] == frames[run[-1]]):
                yield run
                run = []
        run.append(position)
    if run:
        yield run


def _restored(batch: MicroBatch, rows: slice, vision: VisionConfig) -> Tensor:
    """The colours of a frame's pictures [F, H, W, 3], as uint8."""
    side, places = vision.patch_size, batch["patch_places"][0, rows]
    patches = batch["patches"][0, rows].float().view(-1, vision.channels, vision.patch_frames, side, side)
    height, width = places[0, 2:].tolist()
    grid = patches.new_empty(height, width, *patches.shape[1:])  # [R, C, colours, F, side, side]
    grid[places[:, 0], places[:, 1]] = patches
    colours = grid.permute(3, 0, 4, 1, 5, 2).reshape(vision.patch_frames, height * side, width * side, vision.channels)
    scaled = colours * torch.tensor(vision.pixel_std) + torch.tensor(vision.pixel_mean)
    return (scaled * 255).round().clamp(0, 255).to(torch.uint8)
