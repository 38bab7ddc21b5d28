"""Rows that go to other ranks in numbers that only the data decides, and come back."""

from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from mplug import ops
from mplug_testing import run_workers

RANKS, D = 3, 2
CASES: dict[str, list[list[int]]] = {
    "two bins a rank": [[1, 0, 2, 3, 0, 1], [0, 0, 0, 1, 1, 1], [4, 1, 0, 0, 2, 2]],
    "one bin a rank": [[2, 1, 3], [0, 2, 0], [1, 1, 1]],
    "a rank that sends nothing": [[0] * 6, [1] * 6, [2] * 6],
    "a rank that gets nothing": [[3, 1, 0, 0, 1, 1]] * 3,
    "all to one bin": [[0, 0, 0, 5, 0, 0]] * 3,
    "nothing at all": [[0] * 6] * 3,
}
"""How many rows each rank has in each bin."""
PADDING = 2
"""Rows after those of the last bin, which travel nowhere."""


def labels(counts: list[list[int]], rank: int) -> Tensor:
    """A rank's rows, each (bin, sender, number)."""
    rows = [(place, rank, number) for place, count in enumerate(counts[rank]) for number in range(count)]
    return torch.tensor(rows, dtype=torch.float64).view(-1, 3)


def expected(counts: list[list[int]], rank: int) -> Tensor:
    """What a rank gets: the rows of its bins, by bin, then by sender."""
    rows = torch.cat([labels(counts, sender) for sender in range(RANKS)])
    each = len(counts[0]) // RANKS
    own = rows[(rows[:, 0] >= rank * each) & (rows[:, 0] < (rank + 1) * each)]
    key = own[:, 0] * 10_000 + own[:, 1] * 100 + own[:, 2]
    return own[key.argsort()]


def travelled() -> dict[str, tuple[list[int], Tensor, Tensor, float, float]]:
    """Of every case: counts and rows as they arrive, rows that came back, <send x, y> and <x, the gradient of y>."""
    group, rank = dist.group.WORLD, dist.get_rank()
    found = {}
    for name, counts in CASES.items():
        own = labels(counts, rank)
        padded = torch.cat((own, own.new_full((PADDING, 3), torch.nan)))
        meeting = ops.meet(torch.tensor(counts[rank]), group)
        arrived = ops.send(padded, meeting, group)
        back = ops.give_back(arrived, meeting, len(own), group)
        x = torch.randn(len(own), D, generator=torch.Generator().manual_seed(rank), requires_grad=True)
        y = torch.randn(len(arrived), D, generator=torch.Generator().manual_seed(9 + rank), requires_grad=True)
        (gradient,) = torch.autograd.grad(ops.send(x, meeting, group), x, y.detach())
        returned = ops.give_back(y, meeting, len(own), group)
        assert torch.equal(returned, gradient)
        (dual,) = torch.autograd.grad(returned, y, x.detach())
        assert torch.equal(dual, ops.send(x, meeting, group))
        inner = float((x.detach() * gradient).sum()), float((y.detach() * dual).sum())
        found[name] = (meeting.counts.tolist(), arrived, back, *inner)
    return found


def test_rows_arrive_by_bin_and_by_sender_come_back_and_are_each_others_gradient() -> None:
    results = run_workers(RANKS, travelled)
    for name, counts in CASES.items():
        for rank, result in enumerate(results):
            held, arrived, back, _, _ = result[name]
            wanted = expected(counts, rank)
            assert torch.equal(arrived, wanted), name
            first = rank * len(counts[0]) // RANKS
            assert held == [sum(c[first + number] for c in counts) for number in range(len(held))], name
            assert torch.equal(back, labels(counts, rank)), name
        sums = [sum(result[name][place] for result in results) for place in (3, 4)]
        assert all(abs(one - other) < 1e-4 for one, other in pairwise(sums)), name
