"""The process groups of a run: what they count."""

import torch
import torch.distributed as dist

from mplug.distributed.groups import Groups
from mplug.layout.ranks import Grouping
from mplug_testing import run_workers


def begun_after(numbers: list[int]) -> tuple[dict[str, int], bool]:
    groups, names = Groups(dist.get_rank()), dist.distributed_c10d._world.pg_names
    pair = groups.of(Grouping(("dp",), (2,), (2,)))
    assert pair is not None
    name, names[pair] = names[pair], f"split {dist.get_rank()}"  # as the names of split groups can be
    dist.barrier(group=groups.beside())
    dist.barrier(group=groups.beside("votes"))
    assert len(groups.collectives_begun()["saves"]) == 1
    before = groups.collectives_begun()["main"]
    works = [dist.all_reduce(torch.ones(1), group=pair, async_op=True) for _ in range(numbers[dist.get_rank()])]
    after = groups.collectives_begun()["main"]
    for work in works[: min(numbers)]:
        work.wait()
    grown = {name: after[name] - before[name] for name in after if after[name] != before[name]}
    if dist.get_rank() == 1:
        dist.all_reduce(torch.ones(1), group=pair)  # so that rank 0 can end
    names[pair] = name
    return grown, before.keys() == after.keys()


def test_the_collectives_that_a_rank_has_begun_are_counted_by_group_and_alike_on_its_ranks() -> None:
    (first, same), (second, _) = run_workers(2, begun_after, [3, 2])
    assert same
    assert first.keys() == second.keys()
    assert [*first.values(), *second.values()] == [3, 2]
