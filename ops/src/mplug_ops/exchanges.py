"""A flat buffer that ranks exchange, and a check that they agree on its tensors (`mplug_ops.in_order`).

`Exchange.check` compares the ranks' lists before an exchange, if the environment variable `MPLUG_CHECK_EXCHANGES` is 1.
It is for tests, where it is always on: every check is a further collective.
"""

import os
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import Any

import torch
import torch.distributed as dist

from mplug.distributed.exchanges import Item
from mplug_ops.collectives import Group

CHECK = "MPLUG_CHECK_EXCHANGES"
"""The environment variable that turns the check on."""


class Exchange:
    """A flat buffer that the ranks of a group exchange: `what` it is for, and its tensors in the order of the buffer.

    Call `check` before every exchange of the buffer, on all ranks of the group.
    """

    def __init__(self, what: str, group: Group, items: Iterable[Item]) -> None:
        self.what, self.group, self.items = what, group, tuple(items)
        text = repr((what, [tuple(item) for item in self.items]))
        self._print = int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big", signed=True)

    def check(self) -> None:
        """If checks are on, raise RuntimeError on all ranks of the group unless they are about to exchange the same.

        A rank that is alone has no group, and tests without processes have stand-ins for groups: neither is compared. A
        recorded CUDA graph has no check.
        """
        if os.environ.get(CHECK) != "1" or not isinstance(self.group, dist.ProcessGroup) or _must_not_wait():
            return
        own = torch.tensor([self._print], device="cpu" if "gloo" in dist.get_backend_config(self.group) else "cuda")
        prints = [torch.empty_like(own) for _ in range(self.group.size())]
        self.group.allgather([prints], [own]).wait()
        if all(int(one) == self._print for one in prints):
            return
        found: list[Any] = [None] * self.group.size()
        dist.all_gather_object(found, (self.what, self.items), group=self.group)
        raise RuntimeError(_difference(dist.get_process_group_ranks(self.group), found))


def _must_not_wait() -> bool:
    """Whether the CPU may not wait for the device now: while a graph is recorded, or if a test forbids it."""
    if not torch.cuda.is_available():
        return False
    return torch.cuda.is_current_stream_capturing() or torch.cuda.get_sync_debug_mode() != 0


def _difference(ranks: Sequence[int], found: Sequence[tuple[str, tuple[Item, ...]]]) -> str:
    """The first two ranks that differ, and the first tensors in which they do."""
    number, (what, items) = next((n, one) for n, one in enumerate(found) if one != found[0])
    first_what, first = found[0]
    pair = f"ranks {ranks[0]} and {ranks[number]}"
    if what != first_what:
        return f"{pair} of one group begin different exchanges: '{first_what}' and '{what}'"
    length = max(len(first), len(items))
    place = next(n for n in range(length) if first[n : n + 1] != items[n : n + 1])
    tensors = " and ".join(str(one[place]) if place < len(one) else "nothing" for one in (first, items))
    return (
        f"{pair} exchange different buffers ('{what}'): number {place + 1} of their tensors is {tensors}; tensors in a "
        f"flat buffer must have the order of the placements on every rank (mplug_ops.in_order)"
    )
