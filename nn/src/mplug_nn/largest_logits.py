"""The largest attention logit of each head in a step, as a statistic that an optimizer may ask for.

B batch, S queries of this rank, T keys, H query heads, G KV heads, K width of a key.
"""

from collections.abc import Callable
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn

from mplug.layout.inits import TOKENS, Entries, Inits
from mplug.layout.plan import Buffer, Segment
from mplug.model.slots.declaration import Slot, set_defaults
from mplug.tensors.operator import operator
from mplug.tensors.segments import numbered
from mplug_nn.specification import AttentionInputs, AttentionSpec, unseen_by_position

LARGEST = 1 << 26
"""Scores that are in memory at the same time."""


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


def own_positions(keys: Tensor) -> tuple[Tensor, Tensor]:
    """keys [B, T, ...] -> (the keys of whole sequences, the positions [S] of this rank): the default of the slot."""
    return keys, torch.arange(keys.shape[1], device=keys.device)


WHOLE_KEYS = Slot("LargestLogits.whole_keys", "largest_logits", own_positions, gathers_positions=True)


class LargestLogits(nn.Module):
    """Keeps the maximum of scale q kᵀ over the pairs that a head sees: before a soft cap, a bias and attention sinks.

    It is a computation of its own beside the core of attention, so that every kernel may fill the core: one more
    product of queries and keys in forward, and none in backward or in a recomputation. The statistic is at least 0.
    """

    SLOTS: ClassVar[tuple[Slot, ...]] = (WHOLE_KEYS,)
    mixes: ClassVar[frozenset[str]] = frozenset()  # only with what the slot returns, and no output depends on it
    values: Tensor
    whole_keys: Callable[[Tensor], tuple[Tensor, Tensor]]

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.register_buffer("values", torch.zeros(num_heads, dtype=torch.float64), persistent=False)
        set_defaults(self)

    def plan_entries(self, inits: Inits) -> Entries:
        """The meaning of the statistic."""
        heads = Segment("heads", self.values.shape[0])
        return {"values": Buffer((heads,), over=TOKENS, reduction="max", reported=False)}

    def forward(self, q: Tensor, k: Tensor, spec: AttentionSpec, inputs: AttentionInputs) -> None:
        """q [B, S, H, K], k [B, S, G, K] of this rank's positions, as the core receives them."""
        keys, positions = self.whole_keys(k.detach())
        window = 0 if spec.window is None else spec.window
        lengths, groups = inputs.document_lengths, inputs.position_groups
        _keep_largest(self.values, q.detach(), keys, positions, spec.scale, spec.causal, window, lengths, groups)


@operator("mplug::keep_largest_logits", mutates_args=("largest",))
def _keep_largest(
    largest: Tensor,
    q: Tensor,
    k: Tensor,
    positions: Tensor,
    scale: float,
    causal: bool,
    window: int,
    document_lengths: Tensor | None,
    position_groups: Tensor | None,
) -> None:
    """largest [H] = the maximum of itself and of the logits of q [B, S, H, K] and k [B, T, G, K].

    `positions` [S] are those of the queries; `window` 0 is none. Does nothing during a backward pass, as `keep_max`.
    """
    if torch._C._current_graph_task_id() != -1:
        return
    batch, length, groups = k.shape[0], k.shape[1], k.shape[2]
    documents = None if document_lengths is None else numbered(document_lengths, length)  # [B, T]
    of_keys = k.transpose(1, 2).flatten(0, 1).mT  # [B G, K, T]
    step = max(1, LARGEST // (batch * q.shape[2] * length))
    found = []
    for rows, places in zip(q.split(step, dim=1), positions.split(step), strict=True):
        of_queries = rows.unflatten(2, (groups, -1)).permute(0, 2, 3, 1, 4).flatten(2, 3).flatten(0, 1)  # [B G, r s, K]
        scores = _product(of_queries, of_keys).unflatten(0, (batch, groups)).unflatten(2, (-1, len(places)))
        distances = torch.arange(length, device=k.device) - places[:, None]  # [s, T]
        masks = list(unseen_by_position(distances, causal, window or None, _together(position_groups, places)))
        if documents is not None:
            masks.append((documents[:, places, None] != documents[:, None, :])[:, None])
        for mask in masks:
            hidden = mask if mask.ndim == 2 else mask[:, :, None]  # [B, 1, 1, s, T]
            scores = scores.masked_fill(hidden, float("-inf"))
        found.append(scores.amax(dim=(0, 3, 4)).flatten())  # [G, r] -> [H]
    values = torch.stack(found).amax(dim=0).double() * scale
    torch.maximum(largest, values.to(largest.dtype), out=largest)


def _product(queries: Tensor, keys: Tensor) -> Tensor:
    """The products in at least fp32; on a GPU, of operands in their own format."""
    if queries.is_cuda and queries.dtype in (torch.bfloat16, torch.float16):
        found: Tensor = torch.bmm(queries, keys, out_dtype=torch.float32)
        return found
    wide = torch.promote_types(queries.dtype, torch.float32)
    return queries.to(wide) @ keys.to(wide)


def _together(groups: Tensor | None, places: Tensor) -> Tensor | None:
    """Whether queries and keys are in the same group: groups [B, T] -> [B, 1, s, T]."""
    if groups is None:
        return None
    of_queries = groups[:, places]
    return ((of_queries[:, :, None] == groups[:, None, :]) & (of_queries >= 0)[:, :, None])[:, None]
