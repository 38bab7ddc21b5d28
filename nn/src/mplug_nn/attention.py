"""Self-attention with grouped heads, rotary positions and QK-norm.

B batch, S query length, T key length, D embed, H query heads, G KV heads, K head dim, M documents of a sample.
"""

from collections.abc import Callable, Container
from dataclasses import replace
from typing import Any, ClassVar, Unpack

import torch
from torch import Tensor, nn

from mplug.layout.inits import ONES, TOKENS, ZEROS, Entries, Inits
from mplug.layout.plan import Parameter, Segment
from mplug.layout.work import ActivationProduct, Step
from mplug.model.plans.work import in_order
from mplug.model.slots.declaration import Slot, set_defaults
from mplug.tensors.host_buffers import register_host_buffer
from mplug.tensors.random import mix
from mplug_nn.cache import Cache, CacheSize
from mplug_nn.core import packed_heads_of
from mplug_nn.dot_product import DOT_PRODUCT as DOT_PRODUCT
from mplug_nn.dot_product import scaled_dot_product as scaled_dot_product
from mplug_nn.largest_logits import LargestLogits, LogitRows
from mplug_nn.linear import Linear
from mplug_nn.norm_functions import offset
from mplug_nn.packed_heads import PackedHeads, passes_through
from mplug_nn.prologue import Projected
from mplug_nn.rotary import ROTARY_NEEDS, Rotary, Turns
from mplug_nn.specification import (
    CAPABILITIES,
    DOCUMENTS,
    KNOWN,
    AttentionInputs,
    AttentionSpec,
    MoreInputs,
    Weighting,
)
from mplug_nn.turning import PASSING_QK, PASSING_QKV
from mplug_nn.turning import WIDE_NORM as WIDE_NORM
from mplug_nn.turning import prepare_qk as prepare_qk
from mplug_nn.turning import prepare_qkv as prepare_qkv
from mplug_nn.turning import rotate as rotate
from mplug_nn.turning import rotations as rotations


def needs_of_specification(module: nn.Module, entries: Container[str]) -> frozenset[str]:
    """What a core must offer for the specification of a module (`spec`)."""
    spec = getattr(module, "spec", None)
    if not isinstance(spec, AttentionSpec):
        return frozenset()
    if spec.cross:  # documents are those of the queries' sequence
        return spec.needs
    return replace(spec, documents=spec.documents or DOCUMENTS in entries).needs


CORE = Slot(
    "Attention.core",
    "attention",
    DOT_PRODUCT,
    serves=KNOWN | CAPABILITIES,
    needs=needs_of_specification,
    keeps_pairs=True,
)
PREPARE_QK = Slot("Attention.prepare_qk", "qk", PASSING_QK, serves=ROTARY_NEEDS | {WIDE_NORM})
PREPARE_QKV = Slot("Attention.prepare_qkv", "qk", PASSING_QKV, calls={"": (PREPARE_QK.name,)}, composes=True)


class DotProductAttention(nn.Module):
    """Attention without its projections, for blocks that fuse the projections with others.

    `theta` is the base of rotary positions, or a `mplug_nn.Rotary` of another kind; None: no rotary positions.
    `weighting` and `bias` are as in `AttentionSpec`; with the bias 'relative', every call has a table (`RelativeBias`).
    `documents` says that every call has the lengths of documents,
    whatever the loader supplies. With `sinks`, the module has a parameter `sinks` with one score per head. `scale`
    None: 1 / sqrt(head_dim). With `qk_norm_offset`, the scales of QK-norm are 1 + weight, and the norm is computed in
    fp32 (Gemma 3).

    `num_heads`, `num_kv_heads` and `head_dim` are those of the whole model, also on a rank that holds only some of the
    heads. Suppliers and wraps may read them, and `spec`, from a site's module.

    A plugin may attach `largest_logits`, which then sees the queries and keys of every call in training.

    While a model samples, the host may give the module a `cache` (`mplug_nn.Cache`). The module then receives only the
    last positions of its samples, adds their rows to the cache, and attends to all rows in it.
    """

    SLOTS: ClassVar[tuple[Slot, ...]] = (CORE, PREPARE_QK)
    mixes: ClassVar[frozenset[str]] = frozenset()  # only inside a slot
    caches: ClassVar[bool] = True
    static_cache: ClassVar[bool] = True
    cache: Cache | None = None
    largest_logits: LargestLogits | None
    core: Callable[..., Tensor]
    prepare_qk: Callable[..., tuple[Tensor, Tensor]]
    site: Tensor

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        qk_norm: bool,
        theta: float | Rotary | None,
        eps: float = 1e-5,
        bias: str = "",
        scale: float | None = None,
        qk_norm_offset: bool = False,
        value_width: int | None = None,
        **weighting: Unpack[Weighting],
    ) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.theta = theta.turns(head_dim) if isinstance(theta, Rotary) else theta
        self.eps, self.qk_norm_offset = eps, qk_norm_offset
        scale, width = head_dim**-0.5 if scale is None else scale, value_width or head_dim
        self.spec = AttentionSpec(scale, head_dim, width, bias=bias, **weighting)
        self.q_norm = nn.Parameter(torch.empty(head_dim)) if qk_norm else None
        self.k_norm = nn.Parameter(torch.empty(head_dim)) if qk_norm else None
        self.sinks = nn.Parameter(torch.empty(num_heads)) if self.spec.sinks else None
        self.largest_logits = None
        register_host_buffer(self, "site", "site key")
        set_defaults(self)

    def plan_entries(self, inits: Inits) -> Entries:
        """The meaning of the parameters between the projections."""
        entries = {}
        if self.q_norm is not None:
            initial = ZEROS if self.qk_norm_offset else ONES
            entries["q_norm"] = Parameter(("head_dim",), initial, over=(*TOKENS, "heads"))
            entries["k_norm"] = Parameter(("head_dim",), initial, over=(*TOKENS, "kv_heads"))
        if self.sinks is not None:
            entries["sinks"] = Parameter((Segment("heads", self.num_heads),), inits.weight)
        return entries

    def plan_work(self) -> Step:
        """Attention of operands from elsewhere in the unit; then the submodules of a derived class, in order."""
        return (self._core_work(after_unit=True), *in_order(self))

    def _core_work(self, after_unit: bool) -> ActivationProduct:
        """Softmax attention: the products of all heads, for each query and each key that it sees."""
        pair = 6 * self.num_heads * (self.spec.key_width + self.spec.value_width)
        return ActivationProduct(self.spec.flops(pair), after_unit)

    @property
    def scale(self) -> float:
        """The factor of the scores."""
        return self.spec.scale

    @scale.setter
    def scale(self, scale: float) -> None:
        self.spec = replace(self.spec, scale=scale)

    @property
    def dropout(self) -> float:
        """The probability with which an attention weight is dropped in training."""
        return self.spec.dropout

    @dropout.setter
    def dropout(self, dropout: float) -> None:
        self.spec = replace(self.spec, dropout=dropout)

    @property
    def causal(self) -> bool:
        """Whether no query sees a later key."""
        return self.spec.causal

    @causal.setter
    def causal(self, causal: bool) -> None:
        self.spec = replace(self.spec, causal=causal)

    def needs(self, slot: str, entries: Container[str]) -> frozenset[str]:
        """What a supplier of a slot must offer here, beyond the needs of the specification."""
        if slot == CORE.name:
            return frozenset()
        turning = self.theta.needs if isinstance(self.theta, Turns) else frozenset()
        return turning | ({WIDE_NORM} if self.q_norm is not None and self.qk_norm_offset else set())

    def serve_cache(self) -> None:
        """Make the module serve a cache from now on: `spec` then describes what its core computes with one."""
        self.spec = replace(self.spec, own_key_length=True)

    def new_cache(self, size: CacheSize) -> Cache:
        """An empty cache: rows of keys [B, T, G, K] after rotation, and of values [B, T, G, V]; windows keep theirs."""
        return size.cache(None if self.spec.window is None else self.spec.window - 1)

    @property
    def scales_of_norm(self) -> tuple[Tensor | None, Tensor | None]:
        """The scales of QK-norm [K] of queries and keys, as the slots receive them."""
        if self.q_norm is None or self.k_norm is None:
            return None, None
        return (offset(self.q_norm), offset(self.k_norm)) if self.qk_norm_offset else (self.q_norm, self.k_norm)

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        positions: Tensor,
        keys: Tensor,
        document_lengths: Tensor | None = None,
        **more: Unpack[MoreInputs],
    ) -> Tensor:
        """q [B, S, H, K], k and v [B, S, G, K], positions [1 or B, S], keys [B], lengths [B, M] -> [B, S, H, K].

        `more` are tensors of `AttentionInputs`.
        """
        q, k = self.prepare_qk(q, k, positions, *self.scales_of_norm, self.eps, self.theta)
        return self._mixed(q, k, v, keys, document_lengths, **more)

    def _mixed(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        keys: Tensor,
        document_lengths: Tensor | None,
        **more: Unpack[MoreInputs],
    ) -> Tensor:
        if self.cache is not None:
            refuse_documents(document_lengths)
            k, v = self.cache.extend(k, v)
            document_lengths = self.cache.document_lengths(k.shape[1])
        return self._attended(q, k, v, keys, document_lengths, **more)

    def _attended(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        keys: Tensor,
        document_lengths: Tensor | None,
        **more: Unpack[MoreInputs],
    ) -> Tensor:
        """The core's output [B, S, H, V]."""
        spec = self._spec(document_lengths, more.get("position_groups"))
        inputs = self._inputs(spec, keys, document_lengths, **more)
        if self.largest_logits is not None and self.training:
            self.largest_logits(q, k, spec, inputs)
        return self.core(q, k, v, spec, inputs)

    def _spec(self, document_lengths: Tensor | None, position_groups: Tensor | None = None) -> AttentionSpec:
        """What a call computes."""
        if position_groups is not None and not self.spec.position_groups:
            raise ValueError("groups of positions came to an attention without the need 'position groups'")
        is_static = self.cache is not None and self.cache.static_keys is not None
        masks: dict[str, Any] = {
            "documents": document_lengths is not None,
            "static_keys": is_static,
            "position_groups": position_groups is not None and not is_static,  # a single query sees no later key
        }
        return replace(self.spec, dropout=self.spec.dropout if self.training else 0.0, **masks)

    def _inputs(
        self,
        spec: AttentionSpec,
        keys: Tensor,
        document_lengths: Tensor | None,
        **more: Unpack[MoreInputs],
    ) -> AttentionInputs:
        """The tensors of a call."""
        static = None if self.cache is None else self.cache.static_keys
        drawn = mix(keys ^ self.site) if spec.dropout else None
        if not spec.position_groups:
            more["position_groups"] = None
        own = {"num_heads": self.num_heads, "static": static}
        return AttentionInputs(drawn, document_lengths, self.sinks, **own, **more)  # type: ignore[arg-type]


def refuse_documents(document_lengths: Tensor | None) -> None:
    """Raise ValueError if samples with a cache are packed: the documents of a cache are its padding."""
    if document_lengths is not None:
        raise ValueError("a sample with a cache is one document; pass no document lengths")


class Attention(DotProductAttention):
    """Self-attention with its projections: `qkv` (queries, keys and values, fused) before the core, `out` after it.

    `out_bias` None: `out` has a bias if `qkv` has one. With `output_gate`, `qkv` also projects to a gate [B, S, H, K],
    behind the values; the core's output is multiplied by its sigmoid (arXiv 2505.06708, Qwen3-Next).
    """

    SLOTS: ClassVar[tuple[Slot, ...]] = (*DotProductAttention.SLOTS, PREPARE_QKV)
    mixes: ClassVar[frozenset[str]] = frozenset()  # only inside a slot
    caches: ClassVar[bool] = True
    static_cache: ClassVar[bool] = True
    prepare_qkv: Callable[..., tuple[Tensor, Tensor, Tensor]]

    def __init__(
        self,
        dim: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        bias: bool,
        qk_norm: bool,
        theta: float | Rotary | None,
        eps: float = 1e-5,
        attention_bias: str = "",
        scale: float | None = None,
        qk_norm_offset: bool = False,
        out_bias: bool | None = None,
        output_gate: bool = False,
        **weighting: Unpack[Weighting],
    ) -> None:
        norm: dict[str, Any] = {"qk_norm": qk_norm, "eps": eps, "qk_norm_offset": qk_norm_offset}
        heads = num_heads, num_kv_heads, head_dim
        super().__init__(*heads, theta=theta, scale=scale, bias=attention_bias, **norm, **weighting)
        self.output_gate = output_gate
        self.qkv = Linear(dim, ((2 if output_gate else 1) * num_heads + 2 * num_kv_heads) * head_dim, bias)
        self.out = Linear(num_heads * head_dim, dim, bias if out_bias is None else out_bias)

    def plan_entries(self, inits: Inits) -> Entries:
        """The meaning of the parameters."""
        heads = Segment("heads", self.num_heads, self.head_dim)
        keys_or_values = Segment("kv_heads", self.num_kv_heads, self.head_dim, uneven="copy")
        qkv = (heads, keys_or_values, keys_or_values, *((heads,) if self.output_gate else ()))
        entries = {
            **super().plan_entries(inits),
            "qkv.weight": Parameter((qkv, "embed"), inits.weight),
            "out.weight": Parameter(("embed", heads), inits.residual),
        }
        if self.qkv.bias is not None:
            entries["qkv.bias"] = Parameter((qkv,), ZEROS)
        if self.out.bias is not None:
            entries["out.bias"] = Parameter(("embed",), ZEROS)
        return entries

    def plan_work(self) -> Step:
        """The projections around attention."""
        own = (name for name, _ in self.named_parameters(recurse=False))
        return ("qkv", *own, self._core_work(after_unit=False), "out")

    def logit_rows(self) -> tuple[LogitRows, ...]:
        """Queries and keys are rows of the fused projection and of its bias; none counts before QK-norm."""
        if self.q_norm is not None:
            return ()
        width, heads, groups = self.head_dim, self.num_heads, self.num_kv_heads
        names = ("qkv.weight",) if self.qkv.bias is None else ("qkv.weight", "qkv.bias")
        return tuple(
            rows
            for name in names
            for rows in (
                LogitRows(name, "query", 0, heads, width, width),
                LogitRows(name, "key", heads * width, groups, width, width),
            )
        )

    def input_linear(self) -> Linear:
        """The layer that alone reads x in `forward`."""
        return self.qkv

    def forward(
        self,
        x: Tensor | Projected,
        positions: Tensor,
        keys: Tensor,
        document_lengths: Tensor | None = None,
        **more: Unpack[MoreInputs],
    ) -> Tensor:
        """x [B, S, D], positions [1 or B, S], the samples' random keys [B] -> [B, S, D].

        `document_lengths` [B, M] are the lengths of the documents in a packed sample. A position attends only to its
        own document. `more` are tensors of `AttentionInputs`.
        """
        heads = self.qkv(x).unflatten(-1, (-1, self.head_dim))  # [B, S, H + 2G, K]
        num_heads = self.out.weight.shape[1] // self.head_dim  # this rank's heads, from its shard of the weights
        gate = None
        if self.output_gate:
            heads, gate = heads.split((heads.shape[2] - num_heads, num_heads), dim=2)
        num_kv_heads = (heads.shape[2] - num_heads) // 2
        packed = self._packed_heads
        if packed is not None and packed.serves(spec := self._spec(document_lengths, more.get("position_groups"))):
            inputs = self._inputs(spec, keys, document_lengths, **more)
            mixed = packed.attend(heads, num_heads, num_kv_heads, spec, inputs)
        else:
            q, k, v = self.prepare_qkv(
                heads, num_heads, num_kv_heads, positions, *self.scales_of_norm, self.eps, self.theta, self.prepare_qk
            )
            mixed = self._mixed(q, k, v, keys, document_lengths, **more)
        if gate is not None:
            mixed = mixed * gate.sigmoid()
        y: Tensor = self.out(mixed.flatten(-2))
        return y

    @property
    def _packed_heads(self) -> PackedHeads | None:
        """What attends from packed heads; None if something may stand between the projection and the core."""
        packed = packed_heads_of(self.core) if type(self) is Attention else None  # subclasses may call it otherwise
        if packed is None or self.theta is not None or self.cache is not None or self.scales_of_norm[0] is not None:
            return None
        if self.output_gate or self.largest_logits is not None:  # the gate is a part of the packed projection
            return None
        return packed if passes_through(self.prepare_qkv) and passes_through(self.prepare_qk) else None
