"""Attention to the rows of another sequence, which are a stream (`mplug.Stream`).

B batch, s queries of this rank, D embed, H heads of this rank, K head dim, r rows of this rank, R rows, T keys of a
sample.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import ClassVar

from torch import Tensor, nn
from torch.nn import functional as F

from mplug.layout.inits import Entries, Inits
from mplug.layout.plan import Parameter, Segment
from mplug.layout.work import ActivationProduct, Flops, Step
from mplug.model.slots.declaration import Slot, set_defaults
from mplug.tensors.random import mix
from mplug_nn.attention import CORE, DotProductAttention
from mplug_nn.cache import Cache, CacheSize
from mplug_nn.linear import Linear
from mplug_nn.specification import AttentionInputs


def all_rows(rows: Tensor) -> Tensor:
    """The keys and values of all ranks: the default of the slot `CrossAttention.gather`, which is the identity.

    rows [1, r, 2 H K] -> [1, R, 2 H K]. A strategy whose ranks share the segments of a stream gathers them here; in
    backward, it sums the gradients of all ranks' queries.
    """
    return rows


GATHER = Slot("CrossAttention.gather", "join", all_rows)


class CrossKeys(nn.Module):
    """The keys and values of the rows of a stream, for the attention of one block: a unit of the stream.

    So every rank projects its own rows only, and the work counts by rows.
    """

    mixes: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, dim: int, num_heads: int, head_dim: int) -> None:
        super().__init__()
        self.num_heads, self.head_dim = num_heads, head_dim
        self.kv = Linear(dim, 2 * num_heads * head_dim, bias=False)

    def plan_entries(self, inits: Inits) -> Entries:
        """The meaning of the projection."""
        heads = Segment("heads", self.num_heads, self.head_dim)
        return {"kv.weight": Parameter(((heads, heads), "embed"), inits.weight)}

    def forward(self, rows: Tensor) -> Tensor:
        """[1, r, D] -> [1, r, 2 H K]."""
        y: Tensor = self.kv(rows)
        return y


class CrossCache(Cache):
    """The keys and values of a batch (`constants`), computed with the first tokens and kept for those that follow."""

    def rewind(self, positions: int) -> None:
        """Nothing: no row belongs to a position of the queries."""


class CrossAttention(DotProductAttention):
    """Attention of tokens to the rows of a stream that belong to their sample.

    `typical_keys` is the number of rows of a sample by which FLOPs are estimated.
    """

    SLOTS: ClassVar[tuple[Slot, ...]] = (CORE, GATHER)
    mixes: ClassVar[frozenset[str]] = frozenset()  # only inside a slot
    caches: ClassVar[bool] = True
    static_cache: ClassVar[bool] = False  # every batch has other keys, in other memory
    gather: Callable[[Tensor], Tensor]

    def __init__(
        self, dim: int, num_heads: int, head_dim: int, *, typical_keys: int, scale: float | None = None
    ) -> None:
        super().__init__(num_heads, num_heads, head_dim, qk_norm=False, theta=None, scale=scale, causal=False)
        self.spec = replace(self.spec, cross=True)
        self.typical_keys = typical_keys
        self.q = Linear(dim, num_heads * head_dim, bias=False)
        self.out = Linear(num_heads * head_dim, dim, bias=False)
        set_defaults(self)

    def plan_entries(self, inits: Inits) -> Entries:
        """The meaning of the projections."""
        heads = Segment("heads", self.num_heads, self.head_dim)
        return {
            "q.weight": Parameter((heads, "embed"), inits.weight),
            "out.weight": Parameter(("embed", heads), inits.residual),
        }

    def plan_work(self) -> Step:
        """The projections around attention: every query meets every key of its sample."""
        pairs = 6 * self.num_heads * (self.spec.key_width + self.spec.value_width)
        return ("q", ActivationProduct(Flops(pairs * self.typical_keys, 0)), "out")

    def serve_cache(self) -> None:
        """Nothing: the core computes the same from keys that are kept."""

    def new_cache(self, size: CacheSize) -> Cache:
        """An empty cache."""
        return CrossCache(size)

    def forward(self, x: Tensor, memory: Tensor | None, rows: Tensor | None, keys: Tensor) -> Tensor:
        """x [B, s, D], memory [1, r, 2 H K] of `CrossKeys`, rows [B, T], the samples' random keys [B] -> [B, s, D].

        `rows` are the numbers of a sample's rows in those of all ranks, then -1 as padding. Without both, the cache has
        what an earlier call has made of them.
        """
        q = self.q(x).unflatten(-1, (-1, self.head_dim))  # [B, S, H, K]
        k, v, counts = self._kept() if memory is None or rows is None else self._of_rows(memory, rows)
        spec = replace(self.spec, dropout=self.spec.dropout if self.training else 0.0)
        drawn = mix(keys ^ self.site) if spec.dropout else None
        inputs = AttentionInputs(drawn, num_heads=self.num_heads, key_counts=counts)
        y: Tensor = self.out(self.core(q, k, v, spec, inputs).flatten(-2))
        return y

    def _of_rows(self, memory: Tensor, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The keys and values [B, T, H, K] of each sample, and their number [B]; a cache keeps them."""
        chosen = F.embedding(rows.clamp(min=0), self.gather(memory)[0])  # [B, T, 2 H K]
        k, v = chosen.unflatten(-1, (2, -1, self.head_dim)).unbind(2)
        found = k, v, (rows >= 0).sum(dim=1)
        if self.cache is not None:
            self.cache.constants = found
        return found

    def _kept(self) -> tuple[Tensor, ...]:
        if self.cache is None or not self.cache.constants:
            raise ValueError("cross-attention has neither rows nor a cache with what an earlier call made of them")
        return self.cache.constants
