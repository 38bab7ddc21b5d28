"""Chooses the chunked collectives of a tensor-parallel group, at their first use."""

from collections.abc import Callable

import torch.distributed as dist
from torch import Tensor

import mplug_ops as ops
from mplug_nn import Arrival, ChunkedCollectives, Produce
from mplug_nn.chunked_collectives import name_collectives
from mplug_tp.messages import AllReduces, Messages
from mplug_tp.peers import Peers


def name_for(group: dist.ProcessGroup | None, sequence_parallel: bool) -> str:
    """Make a group's chunked collectives known; returns their name. Without a group, they are the identity."""
    if group is None or not sequence_parallel:
        chunked: ChunkedCollectives = AllReduces(group)
    else:
        chunked = SequenceCollectives(group)
    # The compiler's cache knows a graph by the names in it, and shapes depend on the number of parts.
    name = f"mplug_tp/{'' if group is None else group.group_name}/{chunked.num_parts}"
    name_collectives(name, chunked)
    return name


class SequenceCollectives(ChunkedCollectives):
    """Copies between the memories of GPUs if they reach each other, else messages of the process group.

    `chosen` is the one of the two that the group uses; None before its first use.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group, self.num_parts = group, group.size()
        self.chosen: ChunkedCollectives | None = None

    def gathering(self, *parts: Tensor, keep: bool) -> Arrival:
        """By the chosen collectives."""
        return self._chunked(parts[0]).gathering(*parts, keep=keep)

    def summing(
        self, partial: tuple[int, ...], like: Tensor, produce: Produce, fill: Callable[[], None] | None = None
    ) -> Tensor:
        """By the chosen collectives."""
        return self._chunked(like).summing(partial, like, produce, fill)

    def _chunked(self, operand: Tensor) -> ChunkedCollectives:
        if self.chosen is None:
            copies = operand.is_cuda and ops.reachable(self._group)
            self.chosen = Peers(self._group) if copies else Messages(self._group)
        return self.chosen
