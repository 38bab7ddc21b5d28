"""The bias of a router with which a run began, for objectives that recall the first weights. E experts."""

from typing import ClassVar

import torch
from torch import Tensor, nn

from mplug.layout.inits import Entries, Inits
from mplug.layout.plan import Buffer
from mplug_nn.router import ALL_EXPERTS


class FirstBias(nn.Module):
    """Two states: the values [E], and whether they have been kept []. No gradient changes a bias of the choice."""

    mixes: ClassVar[frozenset[str]] = frozenset()
    values: Tensor
    kept: Tensor

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.register_buffer("values", torch.zeros(num_experts))
        self.register_buffer("kept", torch.zeros(()))

    def plan_entries(self, inits: Inits) -> Entries:
        """The meaning of the states: those of the router's bias."""
        return {"values": Buffer((ALL_EXPERTS,)), "kept": Buffer(())}

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
