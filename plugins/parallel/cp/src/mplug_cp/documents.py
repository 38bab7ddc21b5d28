"""The documents of a packed sample, as a part of attention meets them. B batch, M documents."""

import torch
from torch import Tensor

from mplug.nn.parts import Lengths
from mplug_cp.blocks import Block, Ranges


def lengths_in(document_lengths: Tensor | None, block: Block) -> Lengths | None:
    """How long each document is among a part's queries, and how long among its keys: [B, M] -> two times [B, M].

    Chunks keep the order of the sequence, so a document is one stretch of them; and whatever a full part has of a
    document's keys comes before whatever it has of its queries.
    """
    if document_lengths is None:
        return None
    return _clipped(document_lengths, block.of_queries), _clipped(document_lengths, block.of_keys)


def _clipped(lengths: Tensor, ranges: Ranges) -> Tensor:
    ends = lengths.cumsum(dim=1)
    starts = ends - lengths
    inside = [(ends.clamp(max=part.stop) - starts.clamp(min=part.start)).clamp(min=0) for part in ranges]
    return torch.stack(inside).sum(dim=0)
