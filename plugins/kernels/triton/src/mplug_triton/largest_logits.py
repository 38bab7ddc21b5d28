"""The supplier of `LargestLogits.maximum`, and its operator.

B batch, S queries of this rank, T keys, H query heads, G KV heads, K width of a key, M documents of a sample.
"""

from typing import Optional

import torch
from torch import Tensor

from mplug_nn import AttentionInputs, AttentionSpec, operator
from mplug_nn.largest_logits import Intervals, pairs
from mplug_nn.parts import Lengths, Places
from mplug_triton.sight import Mask, sight_of


def maximum(
    largest: Tensor, q: Tensor, k: Tensor, intervals: Intervals, spec: AttentionSpec, inputs: AttentionInputs
) -> None:
    """largest [H] becomes the maximum of itself and of the logits of q [B, S, H, K] and k [B, T, G, K]."""
    groups = inputs.position_groups if spec.causal else None  # without a causal mask, a query sees them anyway
    masks = (spec.causal, spec.window, inputs.document_lengths, groups)
    keep_largest(largest, q, k, [place for interval in intervals for place in interval], spec.scale, *masks)


@operator("mplug_triton::keep_largest_logits", mutates_args=("largest",))
def keep_largest(
    largest: Tensor,
    q: Tensor,
    k: Tensor,
    intervals: list[int],
    scale: float,
    causal: bool,
    window: Optional[int],  # noqa: UP045 (torch reads it)
    lengths: Optional[Tensor],  # noqa: UP045
    groups: Optional[Tensor],  # noqa: UP045
) -> None:
    """`maximum`, with the ends of the intervals in one list, and with lengths [B, M] and groups [B, T].

    Does nothing during a backward pass, in which a forward pass is a recomputation.
    """
    if torch._C._current_graph_task_id() != -1:
        return
    from mplug_triton.largest_logits_launch import largest_products

    done = 0
    for first, end in pairs(intervals):
        rows, done = q[:, done : done + end - first], done + end - first
        mask = _mask(range(first, end), k.shape[1], causal, window, lengths, groups)
        found = largest_products(rows, k, sight_of(mask, end - first, k.shape[1], q.device))
        largest.copy_(torch.maximum(largest, (found.double() * scale).to(largest.dtype)))


def _mask(
    queries: range, keys: int, causal: bool, window: int | None, lengths: Tensor | None, groups: Tensor | None
) -> Mask:
    """What hides keys from the queries of consecutive positions."""
    if len(queries) == keys:
        return Mask(causal, window, None if lengths is None else (lengths, lengths), groups)
    own = None if groups is None else (groups[:, queries.start : queries.stop], groups)
    of_segments = None if lengths is None else _lengths_in(queries, lengths)
    return Mask(causal, lengths=of_segments, places=Places((queries,), (range(keys),), window, own))


def _lengths_in(queries: range, lengths: Tensor) -> Lengths:
    """The lengths [B, M] of the documents within consecutive positions, and in the whole sequence."""
    ends = lengths.cumsum(dim=1)
    within = ends.clamp(max=queries.stop) - (ends - lengths).clamp(min=queries.start)
    return within.clamp(min=0), lengths
