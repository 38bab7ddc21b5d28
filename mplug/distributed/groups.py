"""The process groups of a run: all ranks make a group together at its first use, and keep it."""

from datetime import timedelta

import torch.distributed as dist

from mplug.distributed.heartbeats import LONGEST_WRITE
from mplug.layout.ranks import Grouping, Ranks

PATIENCE = {"saves": timedelta(seconds=LONGEST_WRITE)}
"""Time-outs of uses in which a rank may be slow (a write to slow storage). Other uses have that of collectives."""


class Groups:
    """Process groups by their ranks and their use. `timeout` is torch's time-out for a collective."""

    def __init__(self, rank: int, timeout: timedelta | None = None) -> None:
        self.rank, self._timeout = rank, timeout
        self._made: dict[tuple[str, Ranks], dist.ProcessGroup | None] = {}
        self._by_use: dict[str, dist.ProcessGroup] = {}

    def beside(self, use: str = "saves") -> dist.ProcessGroup:
        """A gloo group of all ranks, for collectives of another thread while training uses the other groups.

        Each use has a group of its own, because collectives of one group wait for each other. Collective: all ranks
        must call it.
        """
        if use not in self._by_use:
            timeout = PATIENCE.get(use, self._timeout)
            self._by_use[use] = dist.new_group(backend="gloo", timeout=timeout, group_desc=f"mplug {use}")
        return self._by_use[use]

    def of(self, grouping: Grouping, use: str = "") -> dist.ProcessGroup | None:
        """The process group of this rank's group; None if the rank is alone in it.

        Collective: all ranks must call it with the same grouping, which makes the groups of all ranks, once.
        """
        if grouping.size == 1:
            return None
        if (use, grouping.leader) not in self._made:
            self._made[use, grouping.leader] = self._make(grouping)
        return self._made[use, grouping.leader]

    def _make(self, grouping: Grouping) -> dist.ProcessGroup | None:
        own = grouping.of(self.rank)
        if _splits_at_once():
            # One ncclCommSplit makes the groups of all ranks, and each rank names its own. `new_group` would take one
            # for each group: a thousand for the tensor-parallel groups of 8,192 ranks.
            return dist.split_group(split_ranks=[list(own if len(own) > 1 else grouping.leader)], timeout=self._timeout)
        found = None
        for ranks in grouping.all():
            group = dist.new_group(list(ranks), timeout=self._timeout)
            found = group if ranks == own else found
        return found


def _splits_at_once() -> bool:
    """Whether the processes' default group can be split: it is NCCL's, and bound to a device."""
    return dist.get_backend() == "nccl" and getattr(dist.group.WORLD, "bound_device_id", None) is not None
