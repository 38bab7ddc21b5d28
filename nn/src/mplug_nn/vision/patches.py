"""The embedding of patches. P patches of a micro batch, p those of this rank, C numbers of a patch, D width."""

from collections.abc import Callable
from math import isqrt
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mplug.layout.inits import ZEROS, Entries, Inits
from mplug.layout.plan import Parameter
from mplug.model.slots.declaration import Slot, set_defaults
from mplug_nn.linear import Linear


def own_rows(x: Tensor) -> Tensor:
    """The rows of a stream that this rank embeds: the default of the slot `Patches.rows`, which is the identity.

    x [1, P, ...] -> [1, p, ...]. It runs before the product. A strategy that divides the rows of a stream between two
    blocks takes this rank's rows here.
    """
    return x


ROWS = Slot("Patches.rows", "patches", own_rows)


class PatchEmbedding(nn.Module):
    """A product with flattened patches and, if there are `num_positions`, learned positions.

    The learned positions are a square grid of vectors, which is stretched over the frame of each patch: the corners of
    the grid lie on the corners of the frame, and vectors between the points of the grid are interpolated linearly along
    rows and columns.
    """

    SLOTS: ClassVar[tuple[Slot, ...]] = (ROWS,)
    mixes: ClassVar[frozenset[str]] = frozenset()
    rows: Callable[[Tensor], Tensor]

    def __init__(self, patch_width: int, dim: int, bias: bool, num_positions: int | None = None) -> None:
        super().__init__()
        self.project = Linear(patch_width, dim, bias)
        self.position = nn.Parameter(torch.empty(num_positions, dim)) if num_positions is not None else None
        set_defaults(self)

    def plan_entries(self, inits: Inits) -> Entries:
        """The meaning of the parameters."""
        entries = {"project.weight": Parameter(("embed", "pixels"), inits.weight)}
        if self.project.bias is not None:
            entries["project.bias"] = Parameter(("embed",), ZEROS)
        if self.position is not None:
            entries["position"] = Parameter(("positions", "embed"), inits.weight)
        return entries

    def forward(self, patches: Tensor, places: Tensor) -> Tensor:
        """patches [1, P, C] in any floating dtype, places [1, P, 4] (row, column, rows, columns) -> [1, p, D]."""
        x: Tensor = self.project(self.rows(patches).to(self.project.weight.dtype))
        return x if self.position is None else x + sampled(self.position, self.rows(places)).to(x.dtype)


def sampled(grid: Tensor, places: Tensor) -> Tensor:
    """A square grid of vectors [N, D], row by row, at places [1, p, 4] of frames -> [1, p, D], in at least fp32."""
    side = isqrt(len(grid))
    dtype = torch.promote_types(grid.dtype, torch.float32)
    place, size = places[..., :2].to(dtype), places[..., 2:].to(dtype)
    exact = place * (side - 1) / (size - 1).clamp(min=1)  # [1, p, 2]: along rows and along columns
    first = exact.floor()
    share = exact - first
    before = first.to(torch.int64)
    after = (before + 1).clamp(max=side - 1)
    y = grid.new_zeros((), dtype=dtype)
    for rows, of_row in ((before, 1 - share), (after, share)):
        for columns, of_column in ((before, 1 - share), (after, share)):
            weight = of_row[..., 0] * of_column[..., 1]
            y = y + F.embedding(rows[..., 0] * side + columns[..., 1], grid) * weight[..., None]
    return y
