"""The bias of a router with which a run began, for objectives that recall the first weights. E experts."""

from typing import ClassVar

import torch
from torch import Tensor, nn

from mplug.layout.inits import Entries, Inits
from mplug.layout.plan import Buffer


class FirstBias(nn.Module):
    """Two states: the values [E] along a named axis, and whether they have been kept [].

    No gradient changes a bias of the choice, so it is no state of an optimizer.
    """

    mixes: ClassVar[frozenset[str]] = frozenset()
    values: Tensor
    kept: Tensor

    def __init__(self, num_experts: int, axis: str) -> None:
        super().__init__()
        self.axis = axis
        self.register_buffer("values", torch.zeros(num_experts))
        self.register_buffer("kept", torch.zeros(()))

    def plan_entries(self, inits: Inits) -> Entries:
        """The meaning of the states: those of the router's bias."""
        return {"values": Buffer((self.axis,)), "kept": Buffer(())}

    @torch.no_grad()
    def keep(self, bias: Tensor) -> None:
        """Keep the bias [E], unless a checkpoint has restored the first one."""
        if not bool(self.kept):
            self.values.copy_(bias)
            self.kept.fill_(1.0)

    @torch.no_grad()
    def exchange(self, bias: Tensor) -> None:
        """The bias [E] and the first one exchange their values."""
        own = bias.clone()
        bias.copy_(self.values)
        self.values.copy_(own)
