"""The collectives of a boundary run over one tensor-parallel group. A world has several."""

import pytest
import torch
import torch.distributed as dist
from mplug_tp.boundary import boundary
from torch import Tensor

from mplug_testing import run_workers

GROUPS = [[0, 2], [1, 3]]
SHAPE = (2, 4, 3)
FP8 = torch.float8_e4m3fn


def own(rank: int) -> Tensor:
    """x [B, S, D] of a rank: small whole numbers, which every dtype has."""
    return (torch.arange(24, dtype=torch.float64).view(SHAPE) + 5 * rank) % 13 - 6


def crossed(sequence_parallel: bool) -> list[Tensor]:
    rank = dist.get_rank()
    groups = [dist.new_group(ranks) for ranks in GROUPS]
    made = boundary(groups[rank % 2], sequence_parallel)
    x = own(rank)
    return [made.whole(x), made.whole(x.to(FP8)).double(), made.summed(x), made.largest(x)]


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_ranks_gather_sum_and_maximise_with_the_ranks_of_their_group(sequence_parallel: bool) -> None:
    found = run_workers(4, crossed, sequence_parallel)
    for ranks in GROUPS:
        parts = [own(rank) for rank in ranks]
        total, largest = parts[0] + parts[1], torch.maximum(*parts)
        for place, rank in enumerate(ranks):
            whole = torch.cat(parts, dim=1) if sequence_parallel else parts[place]
            summed = total.chunk(2, dim=1)[place] if sequence_parallel else total
            for result, expected in zip(found[rank], [whole, whole, summed, largest], strict=True):
                assert torch.equal(result, expected)
