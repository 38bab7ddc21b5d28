"""The class `Case`, and random numbers for its inputs."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from mplug.layout.plan import Parameter
from mplug_nn import Attention
from mplug_nn.specification import FULL, KEY_LENGTH, POSITION_GROUPS

Suppliers = Mapping[str, Any]
Tensors = Mapping[str, Tensor]

SINK = "main_grad"
"""The name of the input that is a gradient sink's buffer. It is at least fp32, and a supplier may write only to it."""
BUFFERS = "buffers"
"""The key of suppliers with the tensors that they keep: a mapping from slots to names to tensors."""


@dataclass(frozen=True)
class Case:
    """One call of a slot.

    `module` is the module of the site, on the meta device. `inputs` are integers, and fp64 numbers that a trial rounds
    to its dtype. `bind(suppliers, inputs)` returns the call: a function that returns outputs by name. `needs` are those
    of the site. `truth` replaces the slots' content in `mplug_nn` as the reference for suppliers. `parameters` are the
    plan's entries of the module's parameters.
    """

    slots: tuple[str, ...]
    name: str
    module: nn.Module
    inputs: Tensors
    bind: Callable[[Suppliers, Tensors], Callable[[], dict[str, Tensor]]]
    needs: frozenset[str] = frozenset()
    truth: Suppliers = field(default_factory=dict)
    parameters: Mapping[str, Parameter] = field(default_factory=dict)

    @property
    def plain(self) -> Suppliers:
        """The reference for suppliers, by slot."""
        return {slot: getattr(self.module, slot.rpartition(".")[2]) for slot in self.slots} | dict(self.truth)

    @property
    def causal(self) -> bool:
        """Whether this is attention in which query n sees at most the first n keys."""
        return isinstance(self.module, Attention) and not self.needs & {FULL, KEY_LENGTH, POSITION_GROUPS}

    @property
    def dropout(self) -> float:
        """The probability with which attention weights are dropped."""
        return float(self.module.dropout) if isinstance(self.module, Attention) else 0.0


class Drawn:
    """Random numbers for inputs, the same in every run of a case."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int) -> Tensor:
        """Standard normal numbers, in fp64."""
        return torch.randn(shape, dtype=torch.float64, generator=self._generator, device="cpu")

    def integers(self, below: int, *shape: int) -> Tensor:
        """Integers from 0 to `below` - 1, int64."""
        return torch.randint(below, shape, generator=self._generator, device="cpu")
