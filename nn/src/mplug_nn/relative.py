"""A bias of attention by the distance of a key from its query, learned for ranges of distances (T5, arXiv 1910.10683).

H heads, N ranges, R reach: the distance from which on all distances are in the same range.
"""

from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mplug.layout.inits import Entries, Inits
from mplug.layout.plan import Parameter, Segment
from mplug_nn.turning import numbers_beside


def range_of(distance: int, num_ranges: int, reach: int, *, causal: bool) -> int:
    """The number of the range of a distance (the key's position minus the query's).

    Without `causal`, later keys have the second half of the ranges. Half of the ranges of a direction hold a single
    distance each; the others grow with the logarithm of the distance, and the last one holds all distances from `reach`
    on. All numbers are exact integers, so that no rounding of a logarithm decides at the border of two ranges.
    """
    first, number = 0, num_ranges
    if not causal:
        number //= 2
        first = number if distance > 0 else 0
    far = max(-distance, 0) if causal else abs(distance)
    exact = number // 2
    if far < exact:
        return first + far
    growing = number - exact
    # the largest k with log(far / exact) / log(reach / exact) * growing >= k
    k = 0
    while k + 1 < growing and far**growing * exact ** (k + 1) >= reach ** (k + 1) * exact**growing:
        k += 1
    return first + exact + k


class RelativeBias(nn.Module):
    """The table of all blocks of a stack: a number for each range of distances and head."""

    mixes: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, num_heads: int, num_ranges: int, reach: int, *, causal: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_ranges, num_heads))
        self.ranges = [range_of(one, num_ranges, reach, causal=causal) for one in range(-reach, reach + 1)]

    def plan_entries(self, inits: Inits) -> Entries:
        """The meaning of the table."""
        return {"weight": Parameter(("ranges", Segment("heads", self.weight.shape[1])), inits.weight, decay=False)}

    def forward(self) -> Tensor:
        """The bias of every distance from -R to R: [H, 2R + 1] (`AttentionInputs.bias_table`)."""
        return F.embedding(numbers_beside(self.weight, self.ranges), self.weight).t()
