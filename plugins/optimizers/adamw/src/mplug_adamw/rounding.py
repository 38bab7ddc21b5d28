"""Random bits for stochastic rounding that are the same under every layout.

The bits of an element depend on the seed, the number of updates, the parameter's name and the element's place in it. No
generator has a state.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mplug.tensors.random import key_of, mix

if TYPE_CHECKING:
    from mplug import Piece, Run


def key_of_piece(run: "Run", piece: "Piece") -> int:
    """The key of the random bits of a parameter."""
    return key_of(run.config.trainer.seed, "moments", piece.name)


def counters(shape: Sequence[int], start: Sequence[int], lengths: Sequence[int], device: torch.device) -> Tensor:
    """The number of each element of a box in a logical tensor of this shape, int64."""
    strides = torch.empty(tuple(shape), device="meta").stride()
    found = torch.zeros((), dtype=torch.int64, device=device)
    for first, length, stride in zip(start, lengths, strides, strict=True):
        found = found[..., None] + torch.arange(first, first + length, device=device) * stride
    return found


def bits_of(key: int, step: Tensor, places: Tensor) -> Tensor:
    """The random bits of the elements at `places`, int64, after `step` [] updates."""
    return mix(mix(key + step.to(torch.int64)) ^ mix(places))
