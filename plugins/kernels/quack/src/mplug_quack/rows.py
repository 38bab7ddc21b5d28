"""How the kernels read rows of bf16."""

import torch
from torch import Tensor

ALIGNED = 8
"""Elements of bf16 in 16 bytes, the unit in which rows are read."""


def aligned_rows(x: Tensor) -> Tensor:
    """The tensor [N, I] with contiguous rows that start at multiples of 16 bytes, copied if necessary."""
    plain = x.stride(1) == 1 and x.stride(0) % ALIGNED == 0 and x.data_ptr() % 16 == 0
    return x if plain else x.clone(memory_format=torch.contiguous_format)
