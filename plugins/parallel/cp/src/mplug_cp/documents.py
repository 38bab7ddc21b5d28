"""What comes with the tokens of a sample, restricted to a part of attention. B batch, S whole sequence, M documents."""

import torch
from torch import Tensor

from mplug_cp.blocks import Block, Sight
from mplug_nn.parts import Lengths, Places, Ranges


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


def places_in(groups: Tensor | None, block: Block, sight: Sight) -> Places | None:
    """The places of a part that is computed by position, with its part of the groups of positions [B, S]."""
    if not block.by_position:
        return None
    of_parts = None if groups is None else (_held(groups, block.of_queries), _held(groups, block.of_keys))
    return Places(block.of_queries, block.of_keys, sight.window, of_parts)


def _held(groups: Tensor, ranges: Ranges) -> Tensor:
    return torch.cat([groups[:, part.start : part.stop] for part in ranges], dim=1)
