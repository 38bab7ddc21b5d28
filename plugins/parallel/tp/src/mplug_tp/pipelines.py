"""Chooses the pipeline of a tensor-parallel group, at its first use."""

from collections.abc import Callable

import torch.distributed as dist
from mplug_nn import Arrival, Pipeline, Produce
from mplug_nn.pipeline import name_pipeline
from torch import Tensor

from mplug_tp.memory import reachable
from mplug_tp.messages import AllReduces, Messages
from mplug_tp.peers import Peers


def name_for(group: dist.ProcessGroup | None, sequence_parallel: bool) -> str:
    """Make the pipeline of a group known, and return its name. Without a group, it is the identity (`mplug.ops`)."""
    if group is None or not sequence_parallel:
        pipeline: Pipeline = AllReduces(group)
    else:
        pipeline = SequencePipeline(group)
    # The compiler's cache knows a graph by the names in it, and shapes depend on the number of parts.
    name = f"mplug_tp/{'' if group is None else group.group_name}/{pipeline.num_parts}"
    name_pipeline(name, pipeline)
    return name


class SequencePipeline(Pipeline):
    """Copies between the memories of GPUs if they reach each other, else messages of the process group.

    `chosen` is the one of the two that the group uses; None before its first use.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group, self.num_parts = group, group.size()
        self.chosen: Pipeline | None = None

    def gathering(self, *parts: Tensor, keep: bool) -> Arrival:
        """By the chosen pipeline."""
        return self._pipeline(parts[0]).gathering(*parts, keep=keep)

    def summing(
        self, partial: tuple[int, ...], like: Tensor, produce: Produce, fill: Callable[[], None] | None = None
    ) -> Tensor:
        """By the chosen pipeline."""
        return self._pipeline(like).summing(partial, like, produce, fill)

    def _pipeline(self, operand: Tensor) -> Pipeline:
        if self.chosen is None:
            copies = operand.is_cuda and reachable(self._group)
            self.chosen = Peers(self._group) if copies else Messages(self._group)
        return self.chosen
