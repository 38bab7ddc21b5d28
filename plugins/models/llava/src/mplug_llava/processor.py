"""From pictures to the entries of the tower. H rows and W columns of pixels, P rows of the tower, C numbers of a patch.

The module imports without torch.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from mplug_llava.config import LlavaConfig
from mplug_llava.vision import CONTEXT, CORNERS, TILED_CONTEXT, VisionConfig
from mplug_streams import Medium

if TYPE_CHECKING:
    from torch import Tensor

    from mplug import MicroBatch
    from mplug_llava.tiles import Tiles
    from mplug_streams import Seen


class PictureProcessor:
    """Makes a square of a picture, as CLIP or SigLIP do, and cuts it into patches. A medium is one picture."""

    def __init__(self, config: LlavaConfig) -> None:
        self.config, self.vision, self.token = config, config.vision, config.image_token
        self.placeholders = frozenset({self.token})
        self.entries = tuple(CONTEXT)

    def prepare(self, content: "Tensor", num_pictures: int = 1) -> Medium:
        """The patches of a picture [1, H, W, 3], and the tokens that stand for them."""
        from mplug_llava.squares import cut, squared

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
        _refuse_other_tokens(tokens, media, [self.token])
        pictures = [medium.values for own in media for medium in own]
        starts = torch.arange(len(pictures)) * vision.num_rows
        rows = torch.full_like(tokens, -1)
        rows[is_seen] = (starts[:, None] + torch.tensor([*vision.seen_rows])).flatten()
        return {**_tower_entries(pictures, vision), "vision_rows": rows}

    def contents_of(self, batch: "MicroBatch") -> "list[list[Seen]]":
        """The pictures of each sample, restored from the patches of a micro batch."""
        from mplug_llava.restoring import contents_of

        return contents_of(batch, self.config)


class TileProcessor:
    """Makes a square of a picture and squares of its tiles, and cuts them into patches; squares of frames of videos."""

    def __init__(self, config: LlavaConfig) -> None:
        assert config.tiling is not None
        self.config, self.vision, self.tiling, self.token = config, config.vision, config.tiling, config.image_token
        self.placeholders = frozenset({self.token, self.tiling.video_token})
        self.entries = tuple(TILED_CONTEXT)

    def prepare(self, content: "Tensor", num_pictures: int = 1) -> Medium:
        """The tiles of a picture [1, H, W, 3], and the tokens that stand for them."""
        from mplug_llava.tiles import tiles_of

        if len(content) != 1:
            raise ValueError(f"a picture has one frame, and this content has {len(content)}")
        return self._medium(self.token, tiles_of(content, num_pictures, self.vision, self.tiling))

    def prepare_video(self, content: "Tensor", rate: float, encode: "Callable[[str], Sequence[int]]") -> Medium:
        """The squares of the frames [F, H, W, 3] of a video, and the tokens that stand for them; no times matter."""
        from mplug_llava.tiles import frames_of

        return self._medium(self.tiling.video_token, frames_of(content, self.vision, self.tiling))

    def _medium(self, token: int, tiles: "Tiles") -> Medium:
        return Medium((token,) * len(tiles.cells), len(tiles.patches), tiles, mark=(token,))

    def entries_of(
        self, tokens: "Tensor", media: Sequence[Sequence[Medium]], document_lengths: "Tensor | None" = None
    ) -> "Mapping[str, Tensor]":
        """The entries of a micro batch; without a picture in it, they hold one row of zeros that no token refers to."""
        import torch

        marks = sorted(self.placeholders)
        _refuse_other_tokens(tokens, media, marks)
        tiles = [medium.values for own in media for medium in own]
        is_seen, first = torch.isin(tokens, torch.tensor(marks)), 0
        rows = torch.full((*tokens.shape, CORNERS), -1)
        shares = torch.zeros(*tokens.shape, CORNERS, dtype=torch.float64)
        found = []
        for one in tiles:
            found.append(first + one.cells)
            first += len(one.patches)
        if tiles:
            rows[is_seen], shares[is_seen] = torch.cat(found), torch.cat([one.shares for one in tiles])
        entries = _tower_entries([one.patches for one in tiles], self.vision)
        return {**entries, "vision_rows": rows, "vision_shares": shares}

    def contents_of(self, batch: "MicroBatch") -> "list[list[Seen]]":
        """The pictures and videos of each sample, restored from the patches of a micro batch."""
        from mplug_llava.restoring import contents_of

        return contents_of(batch, self.config)


def _refuse_other_tokens(tokens: "Tensor", media: Sequence[Sequence[Medium]], marks: Sequence[int]) -> None:
    """Raise ValueError if the tokens of a sample that stand for media are not those of its media."""
    for number, (own, row) in enumerate(zip(media, tokens.tolist(), strict=True)):
        found, needed = [one for one in row if one in marks], [one for medium in own for one in medium.tokens]
        for mark in marks:
            if (has := found.count(mark)) != (wants := needed.count(mark)):
                raise ValueError(
                    f"sample {number} of the micro batch: its {len(own)} pictures have {wants} tokens, and the text "
                    f"has {has} tokens {mark}"
                )
        if found != needed:
            raise ValueError(f"sample {number} of the micro batch: its pictures and videos are in another order")


def _tower_entries(squares: "Sequence[Tensor]", vision: VisionConfig) -> "dict[str, Tensor]":
    """The entries of the tower, of rows of squares [P, C]; one row of zeros if there are none."""
    import torch

    rows = torch.cat([*squares]) if squares else torch.zeros(1, vision.patch_width)
    number = len(rows) // vision.num_rows if squares else 0
    places = torch.arange(vision.num_rows).repeat(number) if squares else torch.zeros(1, dtype=torch.int64)
    lengths = torch.tensor([vision.num_rows] * number or [1])
    return {"patches": rows[None], "patch_places": places[None], "patch_lengths": lengths[None]}
