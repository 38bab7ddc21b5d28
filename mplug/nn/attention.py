"""Self-attention with grouped heads, rotary positions and QK-norm.

B batch, S query length, T key length, D embed, H query heads, G KV heads, K head dim, M documents of a sample.
"""

from collections.abc import Callable, Container
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mplug.nn.linear import Linear
from mplug.nn.operator import fake, operator
from mplug.nn.parts import PLAIN_PARTS, numbered, with_parts
from mplug.nn.random import mix, uniform

DOCUMENTS, FULL = "document_lengths", "full attention"
"""What a site may need of its attention core, beside 'log-sum-exp'."""


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    dropout: float = 0.0,
    keys: Tensor | None = None,
    first_head: int = 0,
    document_lengths: Tensor | None = None,
    causal: bool = True,
) -> Tensor:
    """softmax(scale q kᵀ) v under a causal mask: the default of the slot `Attention.core`.

    q [B, S, H, K], k and v [B, T, G, K] with G dividing H -> [B, S, H, K]. `dropout` is the probability with which a
    weight is dropped, by a mask that is a function of `keys` [B], head (the first is `first_head`) and positions.

    Two arguments come only to who says that it offers them, where the site needs them: 'document_lengths' [B, M],
    int64, of samples that are packed: they add up to S in the order of the documents, zeros fill up, and no query sees
    another document's keys; and `causal` False ('full attention'). A supplier that offers 'log-sum-exp' has an
    attribute `parts` (`mplug.nn.parts.AttentionParts`), for who calls it part by part.
    """
    heads, groups = q.shape[2], k.shape[2]
    k, v = (x.repeat_interleave(heads // groups, dim=2) for x in (k, v))
    scores = torch.einsum("bshk,bthk->bhst", q, k) * scale
    if causal:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(future, float("-inf"))
    if document_lengths is not None:
        scores = scores.masked_fill(~same_document(document_lengths, q.shape[1]), float("-inf"))
    weights = scores.softmax(dim=-1)
    if dropout > 0 and keys is not None:
        rows = mix(keys[:, None] + torch.arange(first_head, first_head + heads, device=q.device))  # [B, H]
        rows = mix(rows[..., None] + torch.arange(q.shape[1], device=q.device))  # [B, H, S]
        kept = uniform(rows[..., None], torch.arange(k.shape[1], device=q.device)) >= dropout
        weights = weights * kept / (1 - dropout)
    return torch.einsum("bhst,bthk->bshk", weights, v)


with_parts(attention, PLAIN_PARTS).offers = frozenset({"log-sum-exp", DOCUMENTS, FULL})  # type: ignore[attr-defined]


def same_document(document_lengths: Tensor, length: int) -> Tensor:
    """Which positions are in one document: lengths [B, M] -> [B, 1, S, S], made for one call and kept nowhere."""
    numbers = numbered(document_lengths, length)  # [B, S]
    return (numbers[:, :, None] == numbers[:, None, :])[:, None]


@operator("mplug::rotations")
def rotations(positions: Tensor, half: int, theta: float, dtype: torch.dtype) -> Tensor:
    """The cosine and sine of each pair's angle at each position: positions [1 or B, S] -> [2, 1 or B, S, half].

    An operator of its own, so that a compiler keeps the small table, instead of computing every angle anew for every
    head of queries and keys, forward and backward.
    """
    frequencies = theta ** (-torch.arange(half, device=positions.device, dtype=dtype) / half)
    angles = positions[..., None].to(dtype) * frequencies
    return torch.stack((angles.cos(), angles.sin()))


@fake("mplug::rotations")
def _(positions: Tensor, half: int, theta: float, dtype: torch.dtype) -> Tensor:
    return torch.empty((2, *positions.shape, half), device=positions.device, dtype=dtype)


def rotate(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Rotary positions (RoFormer, arXiv 2104.09864), the first half of the head paired with the second.

    x [B, S, H, K], positions [1 or B, S] -> [B, S, H, K].
    """
    return _turned(x, _cosines_and_sines(x, positions, theta))


def _cosines_and_sines(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    table: Tensor = rotations(positions, x.shape[-1] // 2, theta, wide)
    return table[..., None, :].to(x.dtype)  # [2, 1 or B, S, 1, K/2]


def _turned(x: Tensor, cosines_and_sines: Tensor) -> Tensor:
    cos, sin = cosines_and_sines
    first, second = x.chunk(2, dim=-1)  # two slices would have a backward that pads each half and adds
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def prepare_qk(
    q: Tensor,
    k: Tensor,
    positions: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    theta: float | None,
) -> tuple[Tensor, Tensor]:
    """QK-norm (RMSNorm over the head, arXiv 2010.04245) where there are weights [K], then RoPE where there is `theta`.

    q [B, S, H, K], k [B, S, G, K] -> the same shapes: the default of the slot `Attention.prepare_qk`.
    """
    if q_weight is not None and k_weight is not None:
        q, k = F.rms_norm(q, q_weight.shape, q_weight, eps), F.rms_norm(k, k_weight.shape, k_weight, eps)
    if theta is not None:
        turns = _cosines_and_sines(q, positions, theta)
        q, k = _turned(q, turns), _turned(k, turns)
    return q, k


def prepare_qkv(
    heads: Tensor,
    num_heads: int,
    num_kv_heads: int,
    positions: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    theta: float | None,
    prepare_qk: Callable[..., tuple[Tensor, Tensor]],
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values out of their packed projection: the default of the slot `Attention.prepare_qkv`.

    heads [B, S, H + 2G, K], queries first and values last -> q [B, S, H, K], k and v [B, S, G, K]. `prepare_qk` is what
    fills the narrower slot `Attention.prepare_qk`, given the other arguments; a supplier that fuses its work does not
    call it. v is heads' own part, as a view if it can be.
    """
    q, k, v = heads.split((num_heads, num_kv_heads, num_kv_heads), dim=2)
    q, k = prepare_qk(q, k, positions, q_weight, k_weight, eps, theta)
    return q, k, v


class DotProductAttention(nn.Module):
    """Attention between its projections, for blocks that fuse these with others. `theta` None: no rotary positions.

    `causal` False lets queries see later keys.
    `num_heads`, `num_kv_heads` and `head_dim` are the whole model's, whatever a rank has of it: what whoever would fill
    or wrap a slot may ask of a site.
    """

    SLOTS: ClassVar[tuple[str, ...]] = ("Attention.core", "Attention.prepare_qk")
    mixes: ClassVar[frozenset[str]] = frozenset()  # but in a slot
    site: Tensor

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        qk_norm: bool,
        theta: float | None,
        dropout: float = 0.0,
        eps: float = 1e-5,
        causal: bool = True,
    ) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.theta, self.dropout, self.eps, self.scale = theta, dropout, eps, head_dim**-0.5
        self.causal = causal
        self.q_norm = nn.Parameter(torch.empty(head_dim)) if qk_norm else None
        self.k_norm = nn.Parameter(torch.empty(head_dim)) if qk_norm else None
        self.register_buffer("site", torch.zeros((), dtype=torch.int64), persistent=False)
        self.core = attention
        self.prepare_qk = prepare_qk

    def needs(self, slot: str, entries: Container[str]) -> frozenset[str]:
        """What a supplier of a slot must offer here, where micro batches have these optional entries."""
        if slot != "Attention.core":
            return frozenset()
        wanted = {DOCUMENTS: DOCUMENTS in entries, FULL: not self.causal}
        return frozenset(need for need, is_wanted in wanted.items() if is_wanted)

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        positions: Tensor,
        keys: Tensor,
        document_lengths: Tensor | None = None,
    ) -> Tensor:
        """q [B, S, H, K], k and v [B, S, G, K], positions [1 or B, S], keys [B], lengths [B, M] -> [B, S, H, K]."""
        q, k = self.prepare_qk(q, k, positions, self.q_norm, self.k_norm, self.eps, self.theta)
        return self._mixed(q, k, v, keys, document_lengths)

    def _mixed(self, q: Tensor, k: Tensor, v: Tensor, keys: Tensor, document_lengths: Tensor | None) -> Tensor:
        dropout = self.dropout if self.training else 0.0
        named: dict[str, Any] = {} if document_lengths is None else {DOCUMENTS: document_lengths}
        if not self.causal:
            named["causal"] = False
        return self.core(
            q, k, v, scale=self.scale, dropout=dropout, keys=mix(keys ^ self.site) if dropout else None, **named
        )


class Attention(DotProductAttention):
    """Projections around an attention core: one for queries, keys and values, one for what they give."""

    SLOTS: ClassVar[tuple[str, ...]] = (*DotProductAttention.SLOTS, "Attention.prepare_qkv")
    mixes: ClassVar[frozenset[str]] = frozenset()  # but in a slot

    def __init__(
        self,
        dim: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        bias: bool,
        qk_norm: bool,
        theta: float | None,
        dropout: float = 0.0,
        eps: float = 1e-5,
        causal: bool = True,
    ) -> None:
        named: dict[str, Any] = {"theta": theta, "dropout": dropout, "eps": eps, "causal": causal}
        super().__init__(num_heads, num_kv_heads, head_dim, qk_norm=qk_norm, **named)
        self.qkv = Linear(dim, (num_heads + 2 * num_kv_heads) * head_dim, bias)
        self.out = Linear(num_heads * head_dim, dim, bias)
        self.prepare_qkv = prepare_qkv

    def forward(self, x: Tensor, positions: Tensor, keys: Tensor, document_lengths: Tensor | None = None) -> Tensor:
        """x [B, S, D], positions [1 or B, S], the samples' random keys [B] -> [B, S, D].

        `document_lengths` [B, M] are of samples that are packed: nobody attends to another document than his own.
        """
        heads = self.qkv(x).unflatten(-1, (-1, self.head_dim))  # [B, S, H + 2G, K]
        num_heads = self.out.weight.shape[1] // self.head_dim  # of this rank, as the weights are cut
        num_kv_heads = (heads.shape[2] - num_heads) // 2
        weights = (self.q_norm, self.k_norm)
        q, k, v = self.prepare_qkv(
            heads, num_heads, num_kv_heads, positions, *weights, self.eps, self.theta, self.prepare_qk
        )
        y: Tensor = self.out(self._mixed(q, k, v, keys, document_lengths).flatten(-2))
        return y
