"""The process groups of a run: all ranks make a group together at its first use, and keep it."""

from collections.abc import Iterable
from datetime import timedelta

import torch.distributed as dist

from mplug.distributed.heartbeats import LONGEST_WRITE

PATIENCE = {"saves": timedelta(seconds=LONGEST_WRITE)}
"""Time-outs of uses in which a rank may be slow (a write to slow storage). Other uses have that of collectives."""


class Groups:
    """Process groups by their ranks and their use. `timeout` is torch's time-out for a collective."""

    def __init__(self, rank: int, timeout: timedelta | None = None) -> None:
        self.rank, self._timeout = rank, timeout
        self._made: dict[tuple[str, tuple[int, ...]], dist.ProcessGroup] = {}
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

    def of(self, families: Iterable[tuple[int, ...]], use: str = "") -> dist.ProcessGroup | None:
        """The group of this rank among `families`; None if the rank is alone in its family, or in none.

        Collective: all ranks must call it with the same families. It makes a group for every family of at least two
        ranks, in sorted order, because all ranks take part in making each group.
        """
        own = None
        for ranks in sorted(set(families)):
            if len(ranks) > 1 and (use, ranks) not in self._made:
                self._made[use, ranks] = dist.new_group(list(ranks), timeout=self._timeout)
            if self.rank in ranks:
                own = self._made.get((use, ranks))
        return own
