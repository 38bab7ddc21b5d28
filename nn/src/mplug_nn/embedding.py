"""Look-up tables of vectors: tokens, and learned positions."""

from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mplug.layout.inits import Entries, Inits
from mplug.layout.plan import Parameter, Segment
from mplug.model.slots.declaration import Slot
from mplug.tensors.sink import Weights, add_rows


def lookup(indices: Tensor, weight: Tensor) -> Tensor:
    """indices [...] of rows of weight [V, D] -> [..., D]: the default of the slot `Embedding.lookup`.

    If the weight has a gradient sink, backward adds the rows' gradients to it. So backward never allocates a dense
    gradient of shape [V, D].
    """
    table = Weights.of(weight)
    if table.main_grad is None or table.stale is None:
        return F.embedding(indices, weight)
    rows: Tensor = _Lookup.apply(indices, *table)  # type: ignore[no-untyped-call]
    return rows


class _Lookup(torch.autograd.Function):
    """weight[indices]; backward adds the rows' gradients to the sink's buffer.

    The buffer is an argument that backward mutates, so that backward can be traced.
    """

    @staticmethod
    def forward(ctx, indices, weight, main_grad, stale):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(indices)
        ctx.main_grad, ctx.stale = main_grad, stale
        return F.embedding(indices, weight)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        (indices,) = ctx.saved_tensors
        if ctx.needs_input_grad[1]:
            add_rows(ctx.main_grad, ctx.stale, indices.flatten(), grad.reshape(-1, grad.shape[-1]))
        return None, None, None, None


LOOKUP = Slot("Embedding.lookup", "embedding", lookup)


class Embedding(nn.Module):
    """A table [V, D]."""

    SLOTS: ClassVar[tuple[Slot, ...]] = (LOOKUP,)
    mixes: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, num_embeddings: int, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_embeddings, dim))
        self.lookup = lookup

    def plan_entries(self, inits: Inits) -> Entries:
        """The meaning of the table, as one of tokens."""
        vocab = Segment("vocab", self.weight.shape[0], uneven="pad")
        return {"weight": Parameter((vocab, "embed"), inits.weight)}

    def forward(self, indices: Tensor) -> Tensor:
        """[...] -> [..., D]."""
        return self.lookup(indices, self.weight)
