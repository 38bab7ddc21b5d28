"""The process groups of a run: all ranks make a group together at its first use, and keep it."""

from datetime import timedelta

import torch.distributed as dist

from mplug.layout.ranks import Grouping, Ranks

DESCRIBED = "mplug "
"""The beginning of the descriptions of process groups that this module makes."""
SAVES = "saves"
"""The use of the group in which a thread of an asynchronous save communicates."""
PATIENCE = {SAVES: timedelta(hours=6)}
"""Time-outs of uses in which a rank may be slow (a write to slow storage). Other uses have that of collectives."""


class Groups:
    """Process groups by their ranks and their use. `timeout` is torch's time-out for a collective."""

    def __init__(self, rank: int, timeout: timedelta | None = None) -> None:
        self.rank, self._timeout = rank, timeout
        self._made: dict[tuple[str, Ranks], dist.ProcessGroup | None] = {}
        self._by_use: dict[str, dist.ProcessGroup] = {}

    def beside(self, use: str = SAVES) -> dist.ProcessGroup:
        """A gloo group of all ranks, for collectives of another thread while training uses the other groups.

        Each use has a group of its own, because collectives of one group wait for each other. Collective: all ranks
        must call it.
        """
        if use not in self._by_use:
            timeout = PATIENCE.get(use, self._timeout)
            self._by_use[use] = dist.new_group(backend="gloo", timeout=timeout, group_desc=f"{DESCRIBED}{use}")
        return self._by_use[use]

    def of(self, grouping: Grouping, use: str = "", backend: str | None = None) -> dist.ProcessGroup | None:
        """The process group of this rank's group; None if the rank is alone in it.

        `backend` is that of its first use; None: that of the default group. Collective: all ranks must call it with
        the same grouping, which makes the groups of all ranks, once.
        """
        if grouping.size == 1:
            return None
        if (use, grouping.leader) not in self._made:
            self._made[use, grouping.leader] = self._make(grouping, backend)
        return self._made[use, grouping.leader]

    def _make(self, grouping: Grouping, backend: str | None) -> dist.ProcessGroup | None:
        """Make the groups of all ranks. Their description is the same on all ranks, as `collectives_begun` needs it.

        Their names are not: the name of a split group counts the groups of its rank, and some ranks are in fewer.
        """
        own, description = grouping.of(self.rank), f"{DESCRIBED}group {len(self._made)}"
        if backend is None and _splits_at_once():
            # One ncclCommSplit makes the groups of all ranks, and each rank names its own. `new_group` would take one
            # for each group: a thousand for the tensor-parallel groups of 8,192 ranks.
            ranks = list(own if len(own) > 1 else grouping.leader)
            return dist.split_group(split_ranks=[ranks], timeout=self._timeout, group_desc=description)
        found = None
        for members in grouping.all():
            group = dist.new_group(list(members), self._timeout, backend, group_desc=description)
            found = group if members == own else found
        return found

    def close(self) -> None:
        """End all groups that this object has made; later uses make new ones. Collective, between two collectives."""
        made = [*self._made.values(), *self._by_use.values()]
        self._made, self._by_use = {}, {}
        for group in made:
            if group is not None:
                dist.destroy_process_group(group)

    @staticmethod
    def collectives_begun() -> dict[str, dict[str, int]]:
        """By thread ('main', or 'saves' for that of an asynchronous save) and process group: the collectives begun.

        The number is the group's sequence number. A group has the same key on all of its ranks: its description, or its
        name if mplug did not make it. (The names of groups split from NCCL's differ between ranks.) This reads torch's
        state only, so any thread may call it.
        """
        numbers: dict[str, dict[str, int]] = {"main": {}, SAVES: {}}
        world = dist.distributed_c10d._world
        for group, name in list(world.pg_names.items()):
            ranks = world.pg_group_ranks.get(group)
            try:
                number = group._get_sequence_number_for_group()  # type: ignore[attr-defined]
            except (RuntimeError, AttributeError):  # the backend does not count, or the rank is not in the group
                continue
            if ranks and number >= 0:
                description = group.group_desc
                key = description if description.startswith(DESCRIBED) else name
                thread = SAVES if description == f"{DESCRIBED}{SAVES}" else "main"
                numbers[thread][f"{key}/{hash(tuple(sorted(ranks))):x}"] = int(number)
        return numbers


def _splits_at_once() -> bool:
    """Whether the processes' default group can be split: it is NCCL's, and bound to a device."""
    return dist.get_backend() == "nccl" and getattr(dist.group.WORLD, "bound_device_id", None) is not None
