"""What is asked of an attention core: a specification that is fixed, and the tensors that come with a call.

B batch, S queries, T keys, H query heads of this rank, M documents of a sample, R reach of a relative bias. With T
other than S, the queries are the last S of T positions.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from mplug.nn.parts import numbered

LOG_SUM_EXP, DOCUMENTS, FULL = "log-sum-exp", "document_lengths", "full attention"
WINDOW, SOFT_CAP, SINKS = "window", "soft cap", "attention sinks"
VALUE_WIDTH, KEY_LENGTH = "value width", "key length"
ALIBI, RELATIVE = "alibi", "relative"
"""The kinds of bias that have a meaning here; the need of a kind is 'alibi bias'."""
BIASES = frozenset({f"{ALIBI} bias", f"{RELATIVE} bias"})
KNOWN = frozenset({DOCUMENTS, FULL, WINDOW, SOFT_CAP, SINKS, VALUE_WIDTH, KEY_LENGTH}) | BIASES
"""Every need that a specification may have; 'log-sum-exp' is none of a site's, but of who wraps it."""


@dataclass(frozen=True)
class AttentionSpec:
    """What a site's attention computes; equal specifications are one and the same function.

    weights = softmax(cap(scale q kᵀ) + bias) over the keys that a query sees, and the output their sum of values.

    `causal`: no query sees a later key. `window`: none sees a key that is `window` or more positions away. `documents`:
    none sees another document's keys. `soft_cap` c: scores become c tanh(scores / c) (Gemma 2, arXiv 2408.00118).
    `sinks`: every head has one more score, for nothing (gpt-oss, arXiv 2508.10925). `bias`: the kind of what is added
    to the scores by positions and head: 'alibi', -slope |distance| (arXiv 2108.12409), 'relative', a table by distance
    (T5, arXiv 1910.10683), or a kind that some kernel knows. `own_key_length`: there may be more keys than queries.
    `dropout` is the probability with which a weight is dropped. Widths are those of one head.
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

    @property
    def needs(self) -> frozenset[str]:
        """What a supplier must offer beyond the plain case: causal, keys as wide as values and as many as queries."""
        wanted = {
            DOCUMENTS: self.documents,
            FULL: not self.causal,
            WINDOW: self.window is not None,
            SOFT_CAP: self.soft_cap is not None,
            SINKS: self.sinks,
            VALUE_WIDTH: self.value_width != self.key_width,
            KEY_LENGTH: self.own_key_length,
            f"{self.bias} bias": bool(self.bias),
        }
        return frozenset(need for need, is_wanted in wanted.items() if is_wanted)


class AttentionInputs(NamedTuple):
    """The tensors of a call, each None where the specification has no use for it, and the place of its heads.

    The first head of this call is number `first_head` of the whole model's `num_heads`. Gradients flow to `sinks` and
    `bias_table`, which hold this call's heads alone.
    """

    keys: Tensor | None = None
    """[B], int64: with dropout, the mask is a function of them, of a head's number in the whole model and positions."""
    document_lengths: Tensor | None = None
    """[B, M], int64: they add up to S in the order of the documents; zeros fill up."""
    sinks: Tensor | None = None
    """[H]."""
    bias_table: Tensor | None = None
    """[H, 2R + 1]: by the key's position minus the query's, from -R to R; what is farther away has the last value."""
    first_head: int = 0
    num_heads: int | None = None


NO_INPUTS = AttentionInputs()


def unseen(
    spec: AttentionSpec, inputs: AttentionInputs, queries: int, keys: int, device: torch.device
) -> Iterator[Tensor]:
    """Masks [S, T] or [B, 1, S, T], true where a query does not see a key; made for one call and kept nowhere."""
    if spec.causal:
        yield torch.ones(queries, keys, dtype=torch.bool, device=device).triu(1 + keys - queries)
    if spec.window is not None:
        yield _distances(queries, keys, device).abs() >= spec.window
    if inputs.document_lengths is not None:
        yield ~same_document(inputs.document_lengths, queries)


def bias_of(
    spec: AttentionSpec, inputs: AttentionInputs, heads: int, queries: int, keys: int, device: torch.device
) -> Tensor | None:
    """What is added to the scores [B, H, S, T]: [H, S, T], or None; ValueError for a kind without a meaning here."""
    if not spec.bias:
        return None
    distances = _distances(queries, keys, device)
    if spec.bias == ALIBI and inputs.num_heads is not None:
        own = torch.arange(inputs.first_head, inputs.first_head + heads, device=device)
        return -alibi_slopes(own, inputs.num_heads)[:, None, None] * distances.abs()
    if spec.bias == RELATIVE and inputs.bias_table is not None:
        reach = inputs.bias_table.shape[1] // 2
        return inputs.bias_table[:, distances.clamp(-reach, reach) + reach]
    raise ValueError(f"attention has a bias '{spec.bias}', which plain torch does not know, or not without its inputs")


def alibi_slopes(heads: Tensor, num_heads: int) -> Tensor:
    """The slopes of heads [H], by their numbers in the whole model of `num_heads` (ALiBi, arXiv 2108.12409, section 3).

    Of 2^n heads, the powers of 2^(-8 / 2^n); of another number those of the next lower power of two, then every other
    one of twice as many heads.
    """
    power = 2 ** (num_heads.bit_length() - 1)
    more = (2 * (heads - power) + 1) / (2 * power)
    return torch.exp2(-8 * torch.where(heads < power, (heads + 1) / power, more))


def same_document(document_lengths: Tensor, length: int) -> Tensor:
    """Which positions are in one document: lengths [B, M] -> [B, 1, S, S], made for one call and kept nowhere."""
    numbers = numbered(document_lengths, length)  # [B, S]
    return (numbers[:, :, None] == numbers[:, None, :])[:, None]


def _distances(queries: int, keys: int, device: torch.device) -> Tensor:
    """The key's position minus the query's: [S, T]."""
    own = torch.arange(keys - queries, keys, device=device)
    return torch.arange(keys, device=device) - own[:, None]
