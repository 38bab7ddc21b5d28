"""The largest attention logit of each head in a step, as a statistic that an optimizer may ask for.

B batch, S queries of this rank, T keys, H query heads, G KV heads, K width of a key.
"""

from collections.abc import Callable, Container, Iterator
from dataclasses import replace
from typing import ClassVar, Literal, NamedTuple, Optional

import torch
from torch import Tensor, nn

from mplug.layout.inits import TOKENS, Entries, Inits
from mplug.layout.plan import Buffer, Segment
from mplug.model.slots.declaration import Slot, set_defaults
from mplug.tensors.operator import operator
from mplug.tensors.segments import numbered
from mplug_nn.specification import (
    DOCUMENTS,
    FULL,
    POSITION_GROUPS,
    WINDOW,
    AttentionInputs,
    AttentionSpec,
    unseen_by_position,
)

LARGEST = 1 << 26
"""Scores that are in memory at the same time."""
QUERIES = 256
"""Maximum number of queries of a product: more of them would read more keys that some of them do not see."""
HIDING = frozenset({DOCUMENTS, FULL, POSITION_GROUPS, WINDOW})
"""The needs of an attention that decide which keys a query sees."""
Intervals = tuple[tuple[int, int], ...]
"""Positions of a sequence as (first, end) of consecutive ones."""


class LogitRows(NamedTuple):
    """Rows of a parameter of an attention that its logits are linear in.

    `parameter` is a name within the module. Head h of `num_heads` has the `width` rows from `first` + h `stride` on.
    `side` 'query' and 'key' meet in one product; 'alone' are queries that meet keys without such rows of their own, as
    all heads share them.
    """

    parameter: str
    side: Literal["query", "key", "alone"]
    first: int
    num_heads: int
    width: int
    stride: int


def own_positions(queries: Tensor, keys: Tensor, document_lengths: Tensor | None) -> tuple[Tensor, Tensor, Intervals]:
    """(queries, keys of whole sequences, the positions of the queries in them): the default of the slot.

    queries [B, S, H, K] and keys [B, S, G, K] are those of this rank's positions, and the lengths [B, M] are those of
    the documents of whole samples. The queries of the result may be those of other positions than this rank's: all
    ranks together have each position once. The positions are pairs of the first of consecutive positions and the one
    after the last, in the order of the queries; they are the same in all samples and steps.
    """
    return queries, keys, ((0, keys.shape[1]),)


def keep_largest_logits(
    largest: Tensor, q: Tensor, k: Tensor, intervals: Intervals, spec: AttentionSpec, inputs: AttentionInputs
) -> None:
    """largest [H] becomes the maximum of itself and of the logits of each head: the default of the slot.

    q [B, S, H, K] are the queries of the positions in `intervals`, in their order, and k [B, T, G, K] the keys of whole
    sequences, both without gradients. Of `spec` and `inputs`, those fields count that hide keys from queries
    (documents, window, groups of positions), and the scale. During a backward pass the function does nothing, as a
    forward pass in it is a recomputation.
    """
    masks = (spec.causal, spec.window, inputs.document_lengths, inputs.position_groups)
    _keep_largest(largest, q, k, [place for interval in intervals for place in interval], spec.scale, *masks)


def _needs_of_masks(module: nn.Module, entries: Container[str]) -> frozenset[str]:
    """What a supplier must offer for the masks of an attention (`spec`)."""
    spec: AttentionSpec = module.spec  # type: ignore[assignment]
    return replace(spec, documents=spec.documents or DOCUMENTS in entries).needs & HIDING


KIND = "largest_logits"
MAXIMUM = Slot("LargestLogits.maximum", KIND, keep_largest_logits, serves=HIDING, needs=_needs_of_masks)
WHOLE_KEYS = Slot("LargestLogits.whole_keys", KIND, own_positions, gathers_positions=True)


class LargestLogits(nn.Module):
    """Keeps the maximum of scale q kᵀ over the pairs that a head sees: before a soft cap, a bias and attention sinks.

    It is a computation of its own beside the core of attention, so that every kernel may fill the core: one more
    product of queries and keys in forward, and none in backward or in a recomputation. The statistic is at least 0.
    `spec` is that of the attention.
    """

    SLOTS: ClassVar[tuple[Slot, ...]] = (MAXIMUM, WHOLE_KEYS)
    mixes: ClassVar[frozenset[str]] = frozenset()  # only with what the slot returns, and no output depends on it
    values: Tensor
    maximum: Callable[[Tensor, Tensor, Tensor, Intervals, AttentionSpec, AttentionInputs], None]
    whole_keys: Callable[[Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor, Intervals]]

    def __init__(self, num_heads: int, spec: AttentionSpec) -> None:
        super().__init__()
        self.spec = spec
        self.register_buffer("values", torch.zeros(num_heads, dtype=torch.float64), persistent=False)
        set_defaults(self)

    def plan_entries(self, inits: Inits) -> Entries:
        """The meaning of the statistic."""
        heads = Segment("heads", self.values.shape[0])
        return {"values": Buffer((heads,), over=TOKENS, reduction="max", reported=False)}

    def forward(self, q: Tensor, k: Tensor, spec: AttentionSpec, inputs: AttentionInputs) -> None:
        """q [B, S, H, K], k [B, S, G, K] of this rank's positions, as the core receives them."""
        lengths = inputs.document_lengths
        queries, keys, intervals = self.whole_keys(q.detach(), k.detach(), lengths)
        if lengths is not None:  # they are on the CPU where ranks divide samples by their documents
            inputs = inputs._replace(document_lengths=lengths.to(k.device, non_blocking=True))
        self.maximum(self.values, queries, keys, intervals, spec, inputs)


@operator("mplug::keep_largest_logits", mutates_args=("largest",))
def _keep_largest(
    largest: Tensor,
    q: Tensor,
    k: Tensor,
    intervals: list[int],
    scale: float,
    causal: bool,
    window: Optional[int],  # noqa: UP045 (torch reads it)
    document_lengths: Optional[Tensor],  # noqa: UP045
    position_groups: Optional[Tensor],  # noqa: UP045
) -> None:
    """`keep_largest_logits`, with the ends of the intervals in one list. Products have only keys that queries see."""
    if torch._C._current_graph_task_id() != -1:
        return
    batch, length, groups = k.shape[0], k.shape[1], k.shape[2]
    documents = None if document_lengths is None else numbered(document_lengths, length)  # [B, T]
    of_keys = k.transpose(1, 2).flatten(0, 1).mT  # [B G, K, T]
    places = torch.cat([torch.arange(*one, device=k.device) for one in pairs(intervals)])
    found, done = [], 0
    for first, end in _chunks(pairs(intervals), max(1, min(QUERIES, LARGEST // (batch * q.shape[2] * length)))):
        rows, own = q[:, done : done + end - first], places[done : done + end - first]
        done += end - first
        keys = _seen_by(first, end, length, causal, window, position_groups is not None)
        of_queries = rows.unflatten(2, (groups, -1)).permute(0, 2, 3, 1, 4).flatten(2, 3).flatten(0, 1)  # [B G, r s, K]
        scores = _product(of_queries, of_keys[:, :, keys]).unflatten(0, (batch, groups)).unflatten(2, (-1, len(own)))
        distances = torch.arange(keys.start, keys.stop, device=k.device) - own[:, None]  # [s, t]
        masks = [*unseen_by_position(distances, causal, window, _together(position_groups, own, keys))]
        if documents is not None:
            masks.append((documents[:, own, None] != documents[:, None, keys])[:, None])
        for mask in masks:
            scores.masked_fill_(mask if mask.ndim == 2 else mask[:, :, None], float("-inf"))  # [B, 1, 1, s, t]
        found.append(scores.amax(dim=(0, 3, 4)).flatten())  # [G, r] -> [H]
    values = torch.stack(found).amax(dim=0).double() * scale
    torch.maximum(largest, values.to(largest.dtype), out=largest)


def pairs(ends: list[int]) -> list[tuple[int, int]]:
    """[first, end, first, end, ...] -> [(first, end), ...]: an operator receives intervals as one list."""
    return [*zip(ends[::2], ends[1::2], strict=True)]


def _chunks(intervals: list[tuple[int, int]], size: int) -> Iterator[tuple[int, int]]:
    for first, end in intervals:
        for start in range(first, end, size):
            yield start, min(start + size, end)


def _seen_by(first: int, end: int, length: int, causal: bool, window: int | None, grouped: bool) -> slice:
    """The keys that at least one of consecutive queries may see."""
    start = 0 if window is None else max(0, first - window + 1)
    if causal:
        return slice(start, length if grouped else end)
    return slice(start, length if window is None else min(length, end - 1 + window))


def _product(queries: Tensor, keys: Tensor) -> Tensor:
    """The products in at least fp32; on a GPU, of operands in their own format."""
    if queries.is_cuda and queries.dtype in (torch.bfloat16, torch.float16):
        found: Tensor = torch.bmm(queries, keys, out_dtype=torch.float32)
        return found
    wide = torch.promote_types(queries.dtype, torch.float32)
    return queries.to(wide) @ keys.to(wide)


def _together(groups: Tensor | None, places: Tensor, keys: slice) -> Tensor | None:
    """Whether queries and keys are in the same group: groups [B, T] -> [B, 1, s, t]."""
    if groups is None:
        return None
    of_queries = groups[:, places]
    return ((of_queries[:, :, None] == groups[:, None, keys]) & (of_queries >= 0)[:, :, None])[:, None]
