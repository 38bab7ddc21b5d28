"""Multi-head latent attention (MLA, arXiv 2405.04434, section 2.1): keys and values come from one narrow vector.

B batch, S sequence, T rows of a cache, D embed, H heads, N width of a key's part without positions, R width of its part
with positions, V width of a value, L width of the latent vector.
"""

from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from mplug.layout.inits import ONES, Entries, Inits
from mplug.layout.plan import Parameter, Segment
from mplug_nn.attention import DotProductAttention, refuse_documents
from mplug_nn.cache import Cache, CacheSize
from mplug_nn.largest_logits import LogitRows
from mplug_nn.linear import Linear
from mplug_nn.norm import Norm
from mplug_nn.rotary import Rotary


class LatentAttention(DotProductAttention):
    """Attention whose projections have a low rank; keys (N + R) may be wider than values (V).

    Queries come from x by `q`, or with `q_rank` by `q_down`, a norm and `q_up`. `kv_down` projects x to the latent
    vector [B, S, L] and to one part of the keys [B, S, R] that all heads share; it has positions. `kv_up` projects the
    normalised latent vector to the other part [B, S, H, N] and to the values [B, S, H, V].

    Tensor parallelism divides the heads of `q`, `q_up`, `kv_up` and `out`; all ranks hold the projections to latent
    vectors. `latent_eps` is that of the norms of latent vectors.

    A cache holds one row [L + R] per position: the normalised latent vector, and the shared part of the keys. With a
    cache, the core has one KV head: the queries' parts without positions, multiplied by the key half of `kv_up`, meet
    the latent vectors themselves, which are also the values; the output is multiplied by the value half of `kv_up`
    (section 2.1.2, "absorbed").
    """

    mixes: ClassVar[frozenset[str]] = frozenset()  # only inside a slot
    caches: ClassVar[bool] = True
    static_cache: ClassVar[bool] = True

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        q_rank: int | None,
        kv_rank: int,
        key_width: int,
        rotary_width: int,
        value_width: int,
        rotary: Rotary | None,
        scale: float | None = None,
        latent_eps: float = 1e-6,
        **masks: Any,
    ) -> None:
        width = key_width + rotary_width
        named: dict[str, Any] = {"scale": scale, "value_width": value_width, **masks}
        super().__init__(num_heads, num_heads, width, qk_norm=False, theta=None, **named)
        self.theta = None if rotary is None else rotary.turns(rotary_width)
        self.kv_rank, self.widths, self.value_width = kv_rank, (key_width, rotary_width), value_width
        self.q = Linear(dim, num_heads * width, bias=False) if q_rank is None else None
        self.q_down = Linear(dim, q_rank, bias=False) if q_rank is not None else None
        self.q_latent_norm = Norm(q_rank, "rmsnorm", latent_eps) if q_rank is not None else None
        self.q_up = Linear(q_rank, num_heads * width, bias=False) if q_rank is not None else None
        self.kv_down = Linear(dim, kv_rank + rotary_width, bias=False)
        self.kv_latent_norm = Norm(kv_rank, "rmsnorm", latent_eps)
        self.kv_up = Linear(kv_rank, num_heads * (key_width + value_width), bias=False)
        self.out = Linear(num_heads * value_width, dim, bias=False)

    def plan_entries(self, inits: Inits) -> Entries:
        """The meaning of the parameters; the latent axes are divided by no strategy."""
        key_width, rotary_width = self.widths
        value_width = self.value_width
        queries = Segment("heads", self.num_heads, self.head_dim)
        latent = (Segment("kv_latent", self.kv_rank), Segment("shared_key", rotary_width))
        entries = {
            **super().plan_entries(inits),
            "kv_down.weight": Parameter((latent, "embed"), inits.weight),
            "kv_latent_norm.weight": Parameter(("kv_latent",), ONES),
            "kv_up.weight": Parameter(
                (Segment("heads", self.num_heads, key_width + value_width), "kv_latent"), inits.weight
            ),
            "out.weight": Parameter(("embed", Segment("heads", self.num_heads, value_width)), inits.residual),
        }
        if self.q is not None:
            return {**entries, "q.weight": Parameter((queries, "embed"), inits.weight)}
        return {
            **entries,
            "q_down.weight": Parameter(("q_latent", "embed"), inits.weight),
            "q_latent_norm.weight": Parameter(("q_latent",), ONES),
            "q_up.weight": Parameter((queries, "q_latent"), inits.weight),
        }

    def logit_rows(self) -> tuple[LogitRows, ...]:
        """Queries and the heads' own part of keys; the part with positions is one for all heads."""
        (still, turning), heads = self.widths, self.num_heads
        queries, stride = ("q.weight" if self.q is not None else "q_up.weight"), still + turning
        return (
            LogitRows(queries, "query", 0, heads, still, stride),
            LogitRows(queries, "alone", still, heads, turning, stride),
            LogitRows("kv_up.weight", "key", 0, heads, still, still + self.value_width),
        )

    def forward(self, x: Tensor, positions: Tensor, keys: Tensor, document_lengths: Tensor | None = None) -> Tensor:
        """x [B, S, D], positions [1 or B, S], the samples' random keys [B] -> [B, S, D]."""
        latent, turning_key = self.kv_down(x).split((self.kv_rank, self.widths[1]), dim=-1)
        latent = self.kv_latent_norm(latent)[0]
        # The shared key takes the way of the latent vector to the heads: through the collective before `kv_up`.
        turning_key = self.kv_up.gather(turning_key)[:, :, None]  # [B, S, 1, R]
        still_query, turning_query = self._unpacked(self._queries(x), self.widths[1])
        turning_query, turning_key = self.prepare_qk(
            turning_query, turning_key, positions, None, None, self.eps, self.theta
        )
        if self.cache is not None:
            refuse_documents(document_lengths)
            rows = torch.cat((self.kv_up.gather(latent)[:, :, None], turning_key), dim=-1)  # [B, S, 1, L + R]
            return self._with_cache(self.cache, still_query, turning_query, rows, keys)
        still, v = self._unpacked(self.kv_up(latent), self.value_width)
        q = torch.cat((still_query, turning_query), dim=-1)
        k = torch.cat((still, turning_key.expand(-1, -1, still.shape[2], -1)), dim=-1)
        y: Tensor = self.out(self._mixed(q, k, v, keys, document_lengths).flatten(-2))
        return y

    def serve_cache(self) -> None:
        """Make the module serve a cache from now on: the core then has one KV head, as wide as a row of the cache."""
        width = self.kv_rank + self.widths[1]
        self.spec = replace(self.spec, key_width=width, value_width=self.kv_rank, own_key_length=True)
        self.num_kv_heads, self.head_dim = 1, width

    def new_cache(self, size: CacheSize) -> Cache:
        """An empty cache: rows [B, T, 1, L + R]; its constants are the halves of `kv_up`, as the core needs them."""
        return size.cache(None if self.spec.window is None else self.spec.window - 1)

    def _with_cache(
        self, cache: Cache, still_query: Tensor, turning_query: Tensor, rows: Tensor, keys: Tensor
    ) -> Tensor:
        """Queries' parts [B, S, H, N] and [B, S, H, R], new rows [B, S, 1, L + R] -> [B, S, D]."""
        if not cache.constants:
            # The product itself is applied to the identity, so that its supplier and adapters count. Tensor parallelism
            # may append the rows of other ranks, which are copies of these.
            identity = torch.eye(self.kv_rank, dtype=rows.dtype, device=rows.device)[None]
            cache.constants = self._unpacked(self.kv_up(identity)[0, : self.kv_rank], self.value_width)
        of_keys, of_values = cache.constants  # [L, H, N], [L, H, V]
        q = torch.cat((torch.einsum("bshn,lhn->bshl", still_query, of_keys), turning_query), dim=-1)
        (k,) = cache.extend(rows)
        y = self._attended(q, k, k[..., : self.kv_rank], keys, cache.document_lengths(k.shape[1]))
        out: Tensor = self.out(torch.einsum("bshl,lhv->bshv", y, of_values).flatten(-2))
        return out

    def _queries(self, x: Tensor) -> Tensor:
        if self.q is not None:
            q: Tensor = self.q(x)
            return q
        assert self.q_down is not None
        assert self.q_latent_norm is not None
        assert self.q_up is not None
        up: Tensor = self.q_up(self.q_latent_norm(self.q_down(x))[0])
        return up

    def _unpacked(self, heads: Tensor, last: int) -> tuple[Tensor, Tensor]:
        """[..., H (N + last)] -> [..., H, N] and [..., H, last]."""
        first, second = heads.unflatten(-1, (-1, self.widths[0] + last)).split((self.widths[0], last), dim=-1)
        return first, second
