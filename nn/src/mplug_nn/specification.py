"""What an attention core computes: a static specification, and the tensors that come with a call.

B batch, S queries, T keys, H query heads of this rank, M documents of a sample, R reach of a relative bias. If T is not
S, the queries are the last S of T positions. With static keys, the keys are the T rows of a static cache.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, TypedDict

import torch
from torch import Tensor
from torch.nn.functional import pad

from mplug.contracts.micro_batch import DOCUMENTS as DOCUMENTS
from mplug.layout.work import Flops, Window
from mplug.tensors.segments import numbered

LOG_SUM_EXP, FULL = "log-sum-exp", "full attention"
PARTS_BY_POSITION = "parts by position"
WINDOW, SOFT_CAP, SINKS = "window", "soft cap", "attention sinks"
VALUE_WIDTH, KEY_LENGTH, STATIC_KEYS = "value width", "key length", "static keys"
POSITION_GROUPS = "position groups"
CROSS = "cross-attention"
ALIBI, RELATIVE = "alibi", "relative"
"""The kinds of bias that plain torch computes. The need of a kind is its name with ' bias' appended: 'alibi bias'."""
BIASES = frozenset({f"{ALIBI} bias", f"{RELATIVE} bias"})
KNOWN = (
    frozenset({DOCUMENTS, FULL, WINDOW, SOFT_CAP, SINKS, VALUE_WIDTH, KEY_LENGTH, STATIC_KEYS, POSITION_GROUPS, CROSS})
    | BIASES
)
"""The needs of sites that plain torch serves. `CAPABILITIES` are not among them: wraps need these, sites never do."""
CAPABILITIES = frozenset({LOG_SUM_EXP, PARTS_BY_POSITION})
"""What a supplier with `mplug_nn.AttentionParts` offers; the second one: parts with `Places`."""


@dataclass(frozen=True)
class AttentionSpec:
    """What a site's attention computes; equal specifications describe the same function.

    weights = softmax(cap(scale q kᵀ) + bias) over the keys that a query sees; the output is the weighted sum of values.

    - `causal`: a query sees no later key.
    - `window`: a query sees only keys that are fewer than `window` positions away.
    - `documents`: a query sees only keys of its own document.
    - `position_groups`: a query of a causal site also sees all later keys of its own group, such as the tokens of one
      image (Gemma 3, arXiv 2503.19786). A window then bounds the earlier keys only.
    - `soft_cap` c: scores become c tanh(scores / c) (Gemma 2, arXiv 2408.00118).
    - `sinks`: every head has one additional score without a value (gpt-oss, arXiv 2508.10925).
    - `bias`: the kind of a term that is added to the scores by position and head: 'alibi', -slope |distance|
      (arXiv 2108.12409); 'relative', a table by distance (T5, arXiv 1910.10683); or a kind that only some kernel knows.
    - `own_key_length`: the number of keys may exceed the number of queries, which are then the last ones.
    - `static_keys`: each sample has one query, and the keys are the rows of a static cache, in the order of its rows
      (`StaticKeys`). The query sees no row that is empty.
    - `dropout`: the probability with which an attention weight is dropped.
    - `cross`: the keys are rows of another sequence, such as those of an encoder. A query sees the first
      `AttentionInputs.key_counts` of them, and has no distance to them. It is combined with `scale`, the widths and
      `dropout` only, and is not `causal`.

    `key_width` and `value_width` are those of one head.
    """

    scale: float
    key_width: int
    value_width: int
    causal: bool = True
    window: int | None = None
    documents: bool = False
    soft_cap: float | None = None
    sinks: bool = False
    bias: str = ""
    own_key_length: bool = False
    dropout: float = 0.0
    static_keys: bool = False
    position_groups: bool = False
    cross: bool = False

    @property
    def needs(self) -> frozenset[str]:
        """What a supplier must offer beyond the plain case (causal, keys as wide as values and as many as queries)."""
        wanted = {
            DOCUMENTS: self.documents,
            FULL: not self.causal,
            WINDOW: self.window is not None,
            SOFT_CAP: self.soft_cap is not None,
            SINKS: self.sinks,
            VALUE_WIDTH: self.value_width != self.key_width,
            KEY_LENGTH: self.own_key_length,
            STATIC_KEYS: self.static_keys,
            POSITION_GROUPS: self.position_groups,
            CROSS: self.cross,
            f"{self.bias} bias": bool(self.bias),
        }
        return frozenset(need for need, is_wanted in wanted.items() if is_wanted)

    def flops(self, pair: int) -> Flops:
        """The FLOPs of attention within one sequence that needs `pair` of them for a query and a key that it sees.

        Half of all pairs count for a causal site, and those inside of the window for a site that has one. Groups of
        positions do not count: they add few pairs.
        """
        if self.window is not None:
            return Flops(0, 0, ((Window(self.window, self.causal), pair),))
        return Flops(0, pair // 2 if self.causal else pair)


class Weighting(TypedDict, total=False):
    """The fields of an `AttentionSpec` that a block passes on as they are; their defaults are those of the class."""

    causal: bool
    window: int | None
    documents: bool
    soft_cap: float | None
    sinks: bool
    dropout: float
    position_groups: bool


class StaticKeys(NamedTuple):
    """Which position each of the T rows of a static cache holds: tensors, so that a CUDA graph can replay a call.

    The rows of a sample are a ring: the row of position p is p modulo T. A row without a position is empty; its values
    are finite. Rows are filled from row 0 on.
    """

    filled: Tensor
    """[B], int32: the number of rows that hold a position; the others are the last rows."""
    distances: Tensor
    """[B, T], int64: the position of a row minus that of the query; 1 if the row is empty."""
    begins: Tensor
    """[B + 1], int32: the first row of each sample in the rows of all samples, and B T."""
    queries: Tensor
    """[B + 1], int32: 0 to B."""


class AttentionInputs(NamedTuple):
    """The tensors of a call and the position of its heads; a tensor that the specification does not use is None.

    The first head of this call is head `first_head` of the whole model's `num_heads`. Gradients flow to `sinks` and
    `bias_table`, which hold only the heads of this call.
    """

    keys: Tensor | None = None
    """[B], int64: the dropout mask is a function of them, of the head's number in the whole model, and of positions."""
    document_lengths: Tensor | None = None
    """[B, M], int64, in the order of the documents; each row sums to the number of keys, padded with zeros."""
    sinks: Tensor | None = None
    """[H]."""
    bias_table: Tensor | None = None
    """[H, 2R + 1], indexed by the key's position minus the query's, clamped to [-R, R]."""
    first_head: int = 0
    num_heads: int | None = None
    static: StaticKeys | None = None
    """The rows of a static cache, if the specification has `static_keys`."""
    position_groups: Tensor | None = None
    """[B, S], int64: the number of each query's group, or -1. The last S keys are in the same groups, others in none.

    The members of a group are consecutive. Under a strategy that divides the sequence, S is that of the whole sample.
    """
    key_counts: Tensor | None = None
    """[B], int64, from 1 to T: with `cross`, the number of keys of each sample; the keys behind them are padding."""
    document_rows: Tensor | None = None
    """[N, L], int64: for each document that counts, the numbers of its rows in those of all samples, then -1.

    With them, a supplier can compute a document at a time, and nothing for the rows of no document, such as padding.
    They are as many for every size of the documents, so shapes do not vary. A supplier may ignore them.
    """


class MoreInputs(TypedDict, total=False):
    """The tensors of `AttentionInputs` that a block passes on as they are."""

    position_groups: Tensor | None
    bias_table: Tensor | None
    document_rows: Tensor | None


NO_INPUTS = AttentionInputs()


def unseen(
    spec: AttentionSpec, inputs: AttentionInputs, queries: int, keys: int, device: torch.device
) -> Iterator[Tensor]:
    """Masks [S, T], [B, 1, S, T] or [B, 1, 1, T], true if a query does not see a key; made anew in every call."""
    if inputs.static is not None:
        distances = inputs.static.distances[:, None, None]  # [B, 1, 1, T]
        yield distances > 0 if spec.window is None else (distances > 0) | (distances <= -spec.window)
        return
    if spec.cross:
        assert inputs.key_counts is not None, "cross-attention comes with the numbers of keys"
        yield (torch.arange(keys, device=device) >= inputs.key_counts[:, None])[:, None, None]
        return
    if spec.causal or spec.window is not None:
        groups = inputs.position_groups
        together = None if groups is None else same_group(groups, keys)
        yield from unseen_by_position(_distances(queries, keys, device), spec.causal, spec.window, together)
    if inputs.document_lengths is not None:
        yield ~same_document(inputs.document_lengths, keys)[:, :, keys - queries :]


def unseen_by_position(
    distances: Tensor, causal: bool, window: int | None, together: Tensor | None = None
) -> Iterator[Tensor]:
    """Masks of the pairs that a query does not see because of the key's position minus the query's: `distances` [S, T].

    `together` [B, 1, S, T]: whether both are in the same group of positions.
    """
    if causal:
        later = distances > 0
        yield later if together is None else later & ~together
    if window is not None:
        yield distances <= -window if causal else distances.abs() >= window


def bias_of(
    spec: AttentionSpec, inputs: AttentionInputs, heads: int, queries: int, keys: int, device: torch.device
) -> Tensor | None:
    """The bias [H, S, T] to add to scores [B, H, S, T], or None; ValueError for an unknown kind or missing inputs.

    With static keys, it is [B, H, 1, T].
    """
    if not spec.bias:
        return None
    static = inputs.static
    if spec.bias == RELATIVE and inputs.bias_table is not None:
        return _relative(inputs.bias_table, queries, keys) if static is None else _of_rows(inputs.bias_table, static)
    if spec.bias == ALIBI and inputs.num_heads is not None:
        distances = _distances(queries, keys, device) if static is None else static.distances[:, None, None]
        own = torch.arange(inputs.first_head, inputs.first_head + heads, device=device)
        return -alibi_slopes(own, inputs.num_heads)[:, None, None] * distances.abs()
    raise ValueError(f"attention has a bias '{spec.bias}', which plain torch does not know, or not without its inputs")


def _relative(table: Tensor, queries: int, keys: int) -> Tensor:
    """The bias of a table [H, 2R + 1] for the last `queries` of the keys: [H, S, T] in at least fp32.

    The values of all distances stand in a line, and each query reads it from its own place on. So the gradient of the
    table is a sum over queries; were it indexed by pairs, all pairs of a distance would be added to one number in
    memory, one after another.
    """
    reach, width = table.shape[1] // 2, queries + keys
    wide = table.to(torch.promote_types(table.dtype, torch.float32))
    distances = torch.arange(1 - keys, queries + 1, device=table.device)  # ascending, and one more
    line = wide[:, distances.clamp(-reach, reach) + reach]  # [H, S + T]
    lines = line[:, None].expand(-1, queries, -1).flatten(1)[:, queries - 1 :]
    shifted: Tensor = lines[:, : queries * (width - 1)].unflatten(1, (queries, width - 1))
    return shifted[:, :, :keys]


def _of_rows(table: Tensor, static: StaticKeys) -> Tensor:
    """The bias of a table [H, 2R + 1] for the rows of a static cache: [B, H, 1, T]."""
    reach = table.shape[1] // 2
    return table[:, static.distances.clamp(-reach, reach) + reach].transpose(0, 1)[:, :, None]


def alibi_slopes(heads: Tensor, num_heads: int) -> Tensor:
    """The slopes of heads [H], by their numbers in the whole model of `num_heads` (ALiBi, arXiv 2108.12409, section 3).

    Let n be the largest power of two up to `num_heads`. The first n heads have the slopes 2^(-8 / n), 2^(-16 / n), ...,
    2^-8. The remaining heads have every other slope of a model with 2n heads, beginning with the first.
    """
    power = 2 ** (num_heads.bit_length() - 1)
    more = (2 * (heads - power) + 1) / (2 * power)
    return torch.exp2(-8 * torch.where(heads < power, (heads + 1) / power, more))


def same_document(document_lengths: Tensor, length: int) -> Tensor:
    """Whether two positions are in the same document: lengths [B, M] -> [B, 1, S, S]; made anew in every call."""
    numbers = numbered(document_lengths, length)  # [B, S]
    return (numbers[:, :, None] == numbers[:, None, :])[:, None]


def same_group(groups: Tensor, length: int) -> Tensor:
    """Whether a query and a key are in the same group: groups [B, S] -> [B, 1, S, T]; made anew in every call."""
    of_keys = pad(groups, (length - groups.shape[1], 0), value=-1)
    return ((groups[:, :, None] == of_keys[:, None, :]) & (groups >= 0)[:, :, None])[:, None]


def _distances(queries: int, keys: int, device: torch.device) -> Tensor:
    """The key's position minus the query's: [S, T]."""
    own = torch.arange(keys - queries, keys, device=device)
    return torch.arange(keys, device=device) - own[:, None]
