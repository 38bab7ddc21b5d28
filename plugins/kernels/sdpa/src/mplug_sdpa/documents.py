"""Attention with a mask in memory, a document at a time.

B samples, S positions, N documents of at most L rows, H query heads, G KV heads, K head dim, V value width. A mask
of packed samples has B S² pairs, and a query sees few of them if documents are short; a mask of documents has N L².
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from mplug_nn import AttentionInputs, AttentionSpec


def by_document(
    masked: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, inputs: AttentionInputs
) -> Tensor:
    """Attention by `masked` within the documents of `inputs.document_rows` [N, L]; zeros for rows of no document.

    q [B, S, H, K], k [B, S, G, K], v [B, S, G, V] -> [B, S, H, V].
    """
    rows = inputs.document_rows
    assert rows is not None
    samples, total = q.shape[:2], q.shape[0] * q.shape[1]
    places = torch.where(rows < 0, total, rows)  # padding reads a row of zeros behind all others, and writes it
    heads = (_chosen(x, places) for x in (q, k, v))
    counts = (rows >= 0).sum(dim=1)
    lengths = torch.stack((counts, rows.shape[1] - counts), dim=1)  # the padding of a document is one of its own
    mixed = masked(*heads, replace(spec, documents=True), inputs._replace(document_lengths=lengths))
    empty = mixed.new_zeros(total + 1, *mixed.shape[2:])
    written: Tensor = empty.index_copy(0, places.flatten(), mixed.flatten(0, 1))[:total]
    return written.unflatten(0, samples)


def _chosen(x: Tensor, places: Tensor) -> Tensor:
    """x [B, S, G, K] -> the rows of each document [N, L, G, K]."""
    rows = pad(x.flatten(0, 1).flatten(1), (0, 0, 0, 1))
    chosen: Tensor = rows.index_select(0, places.flatten())
    return chosen.unflatten(0, places.shape).unflatten(-1, x.shape[2:])
