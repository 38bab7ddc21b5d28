"""Stand-ins for memory that GPUs write to, on a CPU."""

from typing import Any

import torch
import torch.distributed as dist
from mplug_ep.mailbox import MAILBOXES
from torch import Tensor

from mplug.run.run import Run


class Messages:
    """In place of memory that ranks write to: messages of the process group. What no rank writes is not a number."""

    def __init__(self, group: Any) -> None:
        self.group, self.started = group, dict[int, Tensor]()

    def exchange(self, rows: Tensor, rank: Tensor, place: Tensor, num_places: int) -> Tensor:
        arrived, found = rows.new_full((num_places, rows.shape[1]), float("nan")), [None] * self.group.size()
        dist.all_gather_object(found, (rows, rank, place), group=self.group)
        for rows, rank, place in found:  # type: ignore[misc]
            own = rank == self.group.rank()
            arrived[place[own]] = rows[own]
        return arrived

    def take(self, arrived: Tensor, written: Tensor | None) -> Tensor:
        return arrived if written is None else torch.where((written >= 0)[:, None], arrived, 0)

    def start(self, rows: Tensor, rank: Tensor, place: Tensor, num_places: int) -> Tensor:
        ticket = rows.new_full((num_places, rows.shape[1]), float("nan"))
        self.started[ticket.data_ptr()] = self.exchange(rows, rank, place, num_places)
        return ticket

    def wait(self, ticket: Tensor, written: Tensor | None) -> Tensor:
        return self.take(self.started.pop(ticket.data_ptr()), written)

    def restart(self) -> None:
        """Messages have no memory of which one is the first."""


def by_messages(run: Run, group: Any) -> None:
    MAILBOXES[group.group_name] = Messages(group)  # type: ignore[assignment]
