"""Chooses the chunked collectives of a tensor-parallel group, at their first use."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

import mplug_ops as ops
from mplug import UsageError
from mplug_nn import Arrival, ChunkedCollectives, Produce
from mplug_nn.chunked_collectives import name_collectives
from mplug_tp.messages import AllReduces, Messages
from mplug_tp.peers import Peers
from mplug_tp.samples import Samples

RANKS, SAMPLES = "ranks", "samples"
"""The values of `parallel.tp.chunks`."""


def name_for(group: dist.ProcessGroup | None, sequence_parallel: bool, chunks: str = RANKS) -> str:
    """Make a group's chunked collectives known; returns their name. Without a group, they are the identity."""
    if group is None or not sequence_parallel:
        chunked: ChunkedCollectives = AllReduces(group)
    else:
        chunked = SequenceCollectives(group, chunks)
    # The compiler's cache knows a graph by the names in it, and shapes depend on the number of parts.
    name = f"mplug_tp/{'' if group is None else group.group_name}/{chunked.num_parts}"
    name_collectives(name, chunked)
    return name


class SequenceCollectives(ChunkedCollectives):
    """Copies between the memories of GPUs if they reach each other, else messages of the process group.

    `chosen` is what the group uses; None before its first use. `chunks` is `parallel.tp.chunks`.
    """

    def __init__(self, group: dist.ProcessGroup, chunks: str = RANKS) -> None:
        self._group, self.num_parts, self._chunks = group, group.size(), chunks
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
            self.chosen = self._choose(operand.device)
        return self.chosen

    def _choose(self, device: torch.device) -> ChunkedCollectives:
        copies = device.type == "cuda" and ops.reachable(self._group)
        if self._chunks == SAMPLES:
            if not copies:
                raise UsageError(
                    "parallel.tp.chunks=samples needs GPUs of one host that access each other's memory, and those of "
                    "the ranks of tp do not; set parallel.tp.chunks=ranks"
                )
            return Samples(self._group, device, Peers(self._group))
        return Peers(self._group) if copies else Messages(self._group)
