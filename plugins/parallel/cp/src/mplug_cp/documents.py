"""Document lengths of packed samples, restricted to a part of attention. B batch, M documents."""

import torch
from torch import Tensor

from mplug_cp.blocks import Block, Ranges
from mplug_nn.parts import Lengths


def lengths_in(document_lengths: Tensor | None, block: Block) -> Lengths | None:
    """Each document's number of queries and number of keys in a part: [B, M] -> ([B, M], [B, M]); None stays None.

    Chunks keep the order of the sequence, so each document is one stretch of a part's queries, and of its keys. In a
    full part of causal attention, a document's keys precede its queries.
    """
    if document_lengths is None:
        return None
    return clipped(document_lengths, block.of_queries), clipped(document_lengths, block.of_keys)


def clipped(lengths: Tensor, ranges: Ranges) -> Tensor:
    """The positions of each document that lie in these ranges of the sequence: [B, M] -> [B, M]."""
    ends = lengths.cumsum(dim=1)
    starts = ends - lengths
    inside = [(ends.clamp(max=part.stop) - starts.clamp(min=part.start)).clamp(min=0) for part in ranges]
    return torch.stack(inside).sum(dim=0)
