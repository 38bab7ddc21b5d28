"""Look-up tables of vectors: tokens, and learned positions."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def lookup(indices: Tensor, weight: Tensor) -> Tensor:
    """indices [...] of rows of weight [V, D] -> [..., D]: the default of the slot `Embedding.lookup`."""
    return F.embedding(indices, weight)


class Embedding(nn.Module):
    """A table [V, D]."""

    SLOTS = ("Embedding.lookup",)

    def __init__(self, num_embeddings: int, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_embeddings, dim))
        self.lookup = lookup

    def forward(self, indices: Tensor) -> Tensor:
        """[...] -> [..., D]."""
        return self.lookup(indices, self.weight)
