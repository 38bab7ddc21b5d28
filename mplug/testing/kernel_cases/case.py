"""What a case is, and the numbers that its inputs are drawn from."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from mplug.nn import Attention
from mplug.nn.specification import FULL, KEY_LENGTH

Suppliers = Mapping[str, Callable[..., Any]]
Tensors = Mapping[str, Tensor]

SINK = "main_grad"
"""The input that is a gradient sink's buffer: in fp32 at least, and the one that a supplier changes."""


@dataclass(frozen=True)
class Case:
    """One call of a slot.

    `module` is the module of the site, on the meta device. `inputs` are integers, and fp64 numbers that are rounded to
    the type that is tried. `bind(suppliers, inputs)` returns the call: a function that gives outputs by name. `needs`
    are the site's; `truth` is what a supplier is compared with, where that is not what `mplug.nn` has in the slots.
    """

    slots: tuple[str, ...]
    name: str
    module: nn.Module
    inputs: Tensors
    bind: Callable[[Suppliers, Tensors], Callable[[], dict[str, Tensor]]]
    needs: frozenset[str] = frozenset()
    truth: Suppliers = field(default_factory=dict)

    @property
    def plain(self) -> Suppliers:
        """What a supplier is compared with, by slot."""
        return {slot: getattr(self.module, slot.rpartition(".")[2]) for slot in self.slots} | dict(self.truth)

    @property
    def causal(self) -> bool:
        """Whether it is attention in which query n sees the first n keys at most."""
        return isinstance(self.module, Attention) and not self.needs & {FULL, KEY_LENGTH}

    @property
    def dropout(self) -> float:
        """The probability with which attention weights are dropped."""
        return float(self.module.dropout) if isinstance(self.module, Attention) else 0.0


class Drawn:
    """Numbers for inputs, the same for every run of a case."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int) -> Tensor:
        """Of the standard normal distribution, in fp64."""
        return torch.randn(shape, dtype=torch.float64, generator=self._generator, device="cpu")

    def integers(self, below: int, *shape: int) -> Tensor:
        """From 0 to below `below`, int64."""
        return torch.randint(below, shape, generator=self._generator, device="cpu")
