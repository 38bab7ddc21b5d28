"""Buffers of a fixed size for the rows that travel: when they are used, and what happens to lost rows."""

import math
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

import mplug_ops as ops
from mplug import Model, Run
from mplug_ep.mailbox import MAILBOXES
from mplug_ep.places import Places, meet
from mplug_nn import count

W = TypeVar("W")


class Bounds:
    """Whether the passes of a run use bounded buffers, and the number of rows that were lost in those of a step.

    Only the passes of training do, because only these can be computed again. `lost` is a tensor on the device.
    """

    def __init__(self, model: Model, room: float) -> None:
        self.model, self.room = model, room
        self.exact = False
        self.lost: Tensor | None = None

    @property
    def apply(self) -> bool:
        """Whether the passes that run now use bounded buffers."""
        return self.lost is not None and not self.exact and self.model.module.training

    def room_for(self, num_rows: int, ranks: int) -> int:
        """The rows that a rank with `num_rows` may send to each rank."""
        return min(math.ceil(self.room * num_rows / ranks), num_rows)

    def places_for(self, num_rows: int, ranks: int) -> int:
        """The rows that a rank with `num_rows` may receive from all ranks."""
        return min(math.ceil(self.room * num_rows), num_rows * ranks)

    def count(self, lost: Tensor) -> None:
        """Add the lost rows of an exchange."""
        assert self.lost is not None
        count(self.lost, lost)

    def met(self, rows: Tensor, counts: Tensor, group: ops.Group) -> ops.BoundedMeeting:
        """The meeting for rows [N, D] in buffers of a fixed size; rows without room are counted."""
        assert group is not None
        places = ops.meet_bounded(counts, len(rows), self.room_for(len(rows), group.size()), group)
        self.count(places.lost)
        return places

    def met_places(self, rows: Tensor, counts: Tensor, group: ops.Group) -> Places:
        """The places for rows [N, D] in the memory of other GPUs; rows without a place are counted."""
        assert group is not None
        places = meet(counts, len(rows), self.places_for(len(rows), group.size()), group)
        self.count(places.lost)
        return places

    def check(self, run: Run) -> Callable[[], bool]:
        """The function that the host calls after the passes of a step; from now on, these use bounded buffers.

        It makes the CPU wait for the device. If a row was lost on any rank, the passes that follow are exact, once.
        """
        self.lost = own = torch.zeros((), dtype=torch.int64, device=run.device)

        def was_exact() -> bool:
            if self.exact:
                self.exact = False
                return True
            self.exact = bool(run.largest(own) > 0)
            own.zero_()
            for mailbox in MAILBOXES.values():  # every step begins with the same memory, so a graph can replay it
                mailbox.restart()
            return not self.exact

        return was_exact


def choosing(exact: W, bounded: W | None, bounds: Bounds | None) -> Callable[[], W]:
    """A function that returns how rows travel in the passes that run now: `exact`, unless `bounds` apply."""
    return lambda: bounded if bounded is not None and bounds is not None and bounds.apply else exact
