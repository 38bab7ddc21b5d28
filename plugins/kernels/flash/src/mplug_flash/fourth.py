"""flash-attn-4 as torch operators, so that a compiler keeps each call as one node of its graph.

B batch, S queries, T keys, H query heads, G KV heads, K head dim, M documents, N stretches. For stretches, the kernel
receives the tokens of all samples concatenated, [B S, H, K], and the start of each stretch.

Trap: never pass a window for a causal mask alone. Older versions spell it as the window (-1, 0). flash-attn-4 silently
takes that as a different mask.
"""

from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor

from mplug_nn import AttentionInputs, AttentionParts, AttentionSpec, PackedHeads, Part, fake, operator
from mplug_nn.parts import Lengths
from mplug_nn.specification import DOCUMENTS, FULL

Parts = tuple[Tensor, Tensor, Tensor]
"""Of queries, keys and values."""


class Weights(NamedTuple):
    """What the weights of a call depend on besides its part: `AttentionSpec` describes window and soft cap.

    `sinks` [H] have the weight exp(sink - log-sum-exp) and no value; the log-sum-exp contains them.
    """

    window: int | None = None
    soft_cap: float | None = None
    sinks: Tensor | None = None

    def named(self, causal: bool) -> dict[str, Any]:
        """The arguments of the library for both passes; none for what a call does not use."""
        named: dict[str, Any] = {}
        if self.window is not None:
            named |= {"window_size_left": self.window - 1, "window_size_right": 0 if causal else self.window - 1}
        if self.soft_cap is not None:
            named["softcap"] = self.soft_cap
        if self.sinks is not None:
            named["learnable_sink"] = self.sinks
        return named


PLAIN = Weights()

# torch reads an operator's schema from its annotated arguments, so `forward` and `backward` list them one by one.


@operator("mplug_flash::forward")
def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    deterministic: bool,
    causal: bool = True,
    document_lengths: Optional[Tensor] = None,  # noqa: UP045 (torch reads it)
    sinks: Optional[Tensor] = None,  # noqa: UP045
    window: Optional[int] = None,  # noqa: UP045
    soft_cap: Optional[float] = None,  # noqa: UP045
) -> tuple[Tensor, Tensor]:
    """q [B, S, H, K], k and v [B, S, G, K], any strides -> (output [B, S, H, K], log-sum-exp [B, H, S] in fp32).

    `deterministic` applies to backward; forward is always deterministic.
    """
    lengths = None if document_lengths is None else (document_lengths, document_lengths)
    return compute(Part(q, k, v, scale, causal, lengths), Weights(window, soft_cap, sinks))


@fake("mplug_flash::forward")
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    b, s, h, _ = q.shape
    return q.new_empty(q.shape), q.new_empty((b, h, s), dtype=torch.float32)


@operator("mplug_flash::backward")
def backward(
    gradient: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    output: Tensor,
    sums: Tensor,
    scale: float,
    deterministic: bool,
    causal: bool = True,
    document_lengths: Optional[Tensor] = None,  # noqa: UP045 (torch reads it)
    sinks: Optional[Tensor] = None,  # noqa: UP045
    window: Optional[int] = None,  # noqa: UP045
    soft_cap: Optional[float] = None,  # noqa: UP045
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradient of the output [B, S, H, K] -> those of q [B, S, H, K], k and v [B, S, G, K], and sinks [H].

    Without sinks, the last one is empty [0].
    """
    lengths = None if document_lengths is None else (document_lengths, document_lengths)
    part, weights = Part(q, k, v, scale, causal, lengths), Weights(window, soft_cap, sinks)
    dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
    of_sinks = _differentiate_into((dq, dk, dv), part, weights, gradient, output, sums, deterministic)
    return dq, dk, dv, q.new_empty(0) if of_sinks is None else of_sinks


@fake("mplug_flash::backward")
def _(
    gradient: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    output: Tensor,
    sums: Tensor,
    scale: float,
    deterministic: bool,
    causal: bool = True,
    document_lengths: Tensor | None = None,
    sinks: Tensor | None = None,
    *_: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    of_sinks = q.new_empty(0) if sinks is None else sinks.new_empty(sinks.shape)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), of_sinks


class _Attention(torch.autograd.Function):
    """q [B, S, H, K], k and v [B, S, G, K], sinks [H] or None -> output [B, S, H, K]; backward: their gradients.

    The log-sum-exp is saved, not differentiated.
    """

    @staticmethod
    def forward(ctx, q, k, v, sinks, document_lengths, deterministic, *static):  # type: ignore[no-untyped-def]
        scale, causal, window, soft_cap = static
        output, sums = forward(q, k, v, scale, deterministic, causal, document_lengths, sinks, window, soft_cap)
        ctx.save_for_backward(q, k, v, output, sums, document_lengths, sinks)
        ctx.deterministic, ctx.static = deterministic, static
        return output

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        *saved, document_lengths, sinks = ctx.saved_tensors
        scale, causal, window, soft_cap = ctx.static
        *of_heads, of_sinks = backward(
            gradient, *saved, scale, ctx.deterministic, causal, document_lengths, sinks, window, soft_cap
        )
        return *of_heads, None if sinks is None else of_sinks, None, None, *(None for _ in ctx.static)


@operator("mplug_flash::packed_backward")
def packed_backward(
    gradient: Tensor,
    heads: Tensor,
    output: Tensor,
    sums: Tensor,
    num_heads: int,
    scale: float,
    deterministic: bool,
    causal: bool = True,
    document_lengths: Optional[Tensor] = None,  # noqa: UP045 (torch reads it)
) -> Tensor:
    """The gradient of the output [B, S, H, K] -> the gradient of heads [B, S, H + 2G, K], contiguous."""
    lengths = None if document_lengths is None else (document_lengths, document_lengths)
    packed = heads.new_empty(heads.shape)
    part = Part(*_split(heads, num_heads), scale, causal, lengths)
    _differentiate_into(_split(packed, num_heads), part, PLAIN, gradient, output, sums, deterministic)
    return packed


@fake("mplug_flash::packed_backward")
def _(gradient: Tensor, heads: Tensor, *_: Any) -> Tensor:
    return heads.new_empty(heads.shape)


class _PackedAttention(torch.autograd.Function):
    """heads [B, S, H + 2G, K] -> output [B, S, H, K]; grad_output -> the gradient of heads, written in place.

    The split is made inside this function, because autograd's own split would concatenate the three gradients.
    """

    @staticmethod
    def forward(ctx, heads, num_heads, scale, deterministic, causal, document_lengths):  # type: ignore[no-untyped-def]
        output, sums = forward(*_split(heads, num_heads), scale, deterministic, causal, document_lengths)
        ctx.save_for_backward(heads, output, sums, document_lengths)
        ctx.options = num_heads, scale, deterministic, causal
        return output

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        *saved, document_lengths = ctx.saved_tensors
        of_heads = packed_backward(gradient, *saved, *ctx.options, document_lengths)
        return of_heads, None, None, None, None, None


class FourthPacked(PackedHeads):
    """Attention from packed heads; its backward writes the parts of one gradient.

    The kernels take gradients of any strides if every row begins at a multiple of 16 bytes. They do not check this.
    """

    offers = frozenset({DOCUMENTS, FULL})

    def __init__(self, deterministic: bool) -> None:
        self.deterministic = deterministic

    def serves(self, spec: AttentionSpec) -> bool:
        """Whether the kernels serve a specification, in formats of 16 bits."""
        return super().serves(spec) and spec.key_width % 8 == 0

    def attend(
        self, heads: Tensor, num_heads: int, num_kv_heads: int, spec: AttentionSpec, inputs: AttentionInputs
    ) -> Tensor:
        """heads [B, S, H + 2G, K] -> [B, S, H, K]."""
        output: Tensor = _PackedAttention.apply(  # type: ignore[no-untyped-call]
            heads, num_heads, spec.scale, self.deterministic, spec.causal, inputs.document_lengths
        )
        return output


def attention(
    q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, inputs: AttentionInputs, deterministic: bool
) -> Tensor:
    """q [B, S, H, K], k and v [B, S, G, K] -> [B, S, H, K], differentiable."""
    given = inputs.sinks, inputs.document_lengths, deterministic
    output: Tensor = _Attention.apply(  # type: ignore[no-untyped-call]
        q, k, v, *given, spec.scale, spec.causal, spec.window, spec.soft_cap
    )
    return output


def compute(part: Part, weights: Weights = PLAIN) -> tuple[Tensor, Tensor]:
    """(output [B, S, H, K], log-sum-exp [B, H, S]) of a part."""
    from flash_attn.cute.interface import _flash_attn_fwd

    q, k, v, scale, causal, lengths, _ = part
    named = {"softmax_scale": scale, "causal": causal, "return_lse": True, **weights.named(causal)}
    if lengths is None:
        output, sums, *_ = _flash_attn_fwd(q, k, v, **named)
        return output, sums
    output, sums, *_ = _flash_attn_fwd(*_rows(q, k, v), **named, **_stretches(q, k, lengths))
    return output.unflatten(0, q.shape[:2]), _by_sample(sums, len(q)).contiguous()


def _differentiate_into(
    gradients: Parts,
    part: Part,
    weights: Weights,
    gradient: Tensor,
    output: Tensor,
    sums: Tensor,
    deterministic: bool,
) -> Tensor | None:
    """Write the gradients of q, k and v, given the output and log-sum-exp over all parts; return that of the sinks.

    `gradients` are tensors of the shapes of q, k and v, or parts of one contiguous tensor of packed heads.
    """
    from flash_attn.cute.interface import _flash_attn_bwd

    q, k, v, scale, causal, lengths, _ = part
    named = {"softmax_scale": scale, "causal": causal, "deterministic": deterministic, **weights.named(causal)}
    if lengths is None:
        rows, sums = [q, k, v, output, gradient], sums.contiguous()
    else:
        gradients = tuple(x.view(-1, *x.shape[2:]) for x in gradients)  # type: ignore[assignment]  # never copies
        named |= _stretches(q, k, lengths)
        rows = _rows(q, k, v, output.contiguous(), gradient.contiguous())
        sums = sums.transpose(0, 1).flatten(1).contiguous()
    into = dict(zip(("dq", "dk", "dv"), gradients, strict=True))
    found = _flash_attn_bwd(*rows, sums, **named, **into)
    return None if weights.sinks is None else found[3]


def _split(heads: Tensor, num_heads: int) -> Parts:
    """heads [B, S, H + 2G, K] -> views [B, S, H, K] and twice [B, S, G, K]."""
    num_kv_heads = (heads.shape[2] - num_heads) // 2
    q, k, v = heads.split((num_heads, num_kv_heads, num_kv_heads), dim=2)
    return q, k, v


def _rows(*xs: Tensor) -> list[Tensor]:
    return [x.flatten(0, 1) for x in xs]


def _by_sample(sums: Tensor, batch: int) -> Tensor:
    """[H, B S] -> [B, H, S]."""
    return sums.unflatten(1, (batch, -1)).transpose(0, 1)


def _stretches(q: Tensor, k: Tensor, lengths: Lengths) -> dict[str, Any]:
    """The starts of the stretches, and an upper bound of their lengths that needs no device synchronization."""
    of_queries, of_keys = map(begins, lengths)
    longest = {"max_seqlen_q": q.shape[1], "max_seqlen_k": k.shape[1]}
    return {"cu_seqlens_q": of_queries, "cu_seqlens_k": of_keys, **longest}


def begins(lengths: Tensor) -> Tensor:
    """The start of each stretch in the concatenated samples, and the end of the last: [B, N] -> int32 [B N + 1]."""
    return torch.nn.functional.pad(lengths.flatten().cumsum(dim=0), (1, 0)).to(torch.int32)


class FourthParts(AttentionParts):
    """Attention by parts; with `deterministic`, its backward is bitwise reproducible."""

    def __init__(self, deterministic: bool) -> None:
        self.deterministic, self.name = deterministic, f"flash_attn_4{'_deterministic' if deterministic else ''}"

    def attend(self, part: Part) -> tuple[Tensor, Tensor]:
        """(output [B, S, H, K], log-sum-exp [B, H, S])."""
        return compute(part)

    def differentiate(
        self, part: Part, grad: Tensor, output: Tensor, log_sum_exp: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(dq [B, S, H, K], dk and dv [B, T, G, K])."""
        dq, dk, dv = (x.new_empty(x.shape) for x in part[:3])
        _differentiate_into((dq, dk, dv), part, PLAIN, grad, output, log_sum_exp, self.deterministic)
        return dq, dk, dv
