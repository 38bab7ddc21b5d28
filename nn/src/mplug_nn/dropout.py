"""Dropout and jitter whose random numbers depend on what they are drawn for, never on the order of the draws."""

from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor, nn

from mplug.model.slots.declaration import Slot
from mplug.tensors.host_buffers import register_host_buffer
from mplug.tensors.operator import fake, operator
from mplug.tensors.random import mix, uniform


def all_rows(positions: Tensor) -> Tensor:
    """The default of the slot `Dropout.rows`: x has a row for every position."""
    return positions


ROWS = Slot("Dropout.rows", "dropout", all_rows)


class Dropout(nn.Module):
    """Dropout whose mask is a function of (seed, step, site, sample, position, feature).

    `site` is a buffer that the host fills from the module's name. So all sites share one compiled graph. If a strategy
    divides the sequence inside the model, the slot `rows` selects the positions of the rows of x.
    """

    SLOTS: ClassVar[tuple[Slot, ...]] = (ROWS,)
    mixes: ClassVar[frozenset[str]] = frozenset()
    site: Tensor

    def __init__(self, probability: float) -> None:
        super().__init__()
        self.probability = probability
        self.rows: Callable[[Tensor], Tensor] = all_rows
        register_host_buffer(self, "site", "site key")

    def forward(self, x: Tensor, keys: Tensor, positions: Tensor) -> Tensor:
        """x [B, S, D], keys [B], positions [1 or B, S] -> [B, S, D]."""
        if not self.training or self.probability == 0:
            return x
        kept = uniform_like(x, keys ^ self.site, self.rows(positions)) >= self.probability
        return x * kept / (1 - self.probability)


class Jitter(nn.Module):
    """x times uniform noise from 1 - epsilon to 1 + epsilon (arXiv 2101.03961, section 2.4), in training only.

    Like a dropout mask, the noise is a function of (seed, step, site, sample, position, feature).
    """

    SLOTS: ClassVar[tuple[Slot, ...]] = (ROWS,)
    mixes: ClassVar[frozenset[str]] = frozenset()
    site: Tensor

    def __init__(self, epsilon: float) -> None:
        super().__init__()
        self.epsilon = epsilon
        self.rows: Callable[[Tensor], Tensor] = all_rows
        register_host_buffer(self, "site", "site key")

    def forward(self, x: Tensor, keys: Tensor, positions: Tensor) -> Tensor:
        """x [B, S, D], keys [B], positions [1 or B, S] -> [B, S, D]."""
        if not self.training or self.epsilon == 0:
            return x
        noise = uniform_like(x, keys ^ self.site, self.rows(positions))
        return x * (1 + self.epsilon * (2 * noise - 1)).to(x.dtype)


@operator("mplug::counters")
def counters(like: Tensor, length: int) -> Tensor:
    """0, 1, ..., length - 1 as int64 on the device of `like`.

    Inductor would compute them, and their product with a constant of 64 bits, in int32 (torch 2.11). It does not look
    into an operator.
    """
    return torch.arange(length, device=like.device)


@fake("mplug::counters")
def _(like: Tensor, length: int) -> Tensor:
    return like.new_empty(length, dtype=torch.int64)


def uniform_like(x: Tensor, keys: Tensor, rows: Tensor) -> Tensor:
    """fp32 numbers in [0, 1) for x [B, S, D], by keys [B] and numbers of the rows [1 or B, S] -> [B, S, D]."""
    of_rows = mix(mix(keys)[:, None] + rows)  # [B, S]
    return uniform(of_rows[..., None], counters(x, x.shape[-1]))
