"""The process groups of a run: made when they are first asked for, by all ranks together, and kept."""

from collections.abc import Iterable
from datetime import timedelta

import torch.distributed as dist

from mplug.heartbeats import LONGEST_WRITE

PATIENCE = {"saves": timedelta(seconds=LONGEST_WRITE)}
"""Uses in which a rank may be slow without a fault, as a slow writer is; others have the time-out of collectives."""


class Groups:
    """Process groups by the ranks in them and their use. `timeout` is how long torch lets a collective wait."""

    def __init__(self, rank: int, timeout: timedelta | None = None) -> None:
        self.rank, self._timeout = rank, timeout
        self._made: dict[tuple[str, tuple[int, ...]], dist.ProcessGroup] = {}
        self._beside: dict[str, dist.ProcessGroup] = {}

    def beside(self, use: str = "saves") -> dist.ProcessGroup:
        """All ranks, over the hosts' network: for what goes on in another thread while training uses the others.

        Each use has a group of its own, because collectives of one group wait for each other.
        """
        if use not in self._beside:
            timeout = PATIENCE.get(use, self._timeout)
            self._beside[use] = dist.new_group(backend="gloo", timeout=timeout, group_desc=f"mplug {use}")
        return self._beside[use]

    def of(self, families: Iterable[tuple[int, ...]], use: str = "") -> dist.ProcessGroup | None:
        """The group of this rank among `families`, for which all ranks must ask alike; None where it is alone.

        Every family of two ranks and more is made, in sorted order, because making one takes all ranks.
        """
        own = None
        for ranks in sorted(set(families)):
            if len(ranks) > 1 and (use, ranks) not in self._made:
                self._made[use, ranks] = dist.new_group(list(ranks), timeout=self._timeout)
            if self.rank in ranks:
                own = self._made.get((use, ranks))
        return own
