"""The supplier of `Attention.core`, its operators, and its parts.

B batch, S queries, T keys, H query heads, G KV heads, K head dim, M documents of a sample.
"""

from typing import Any, Optional

import torch
from torch import Tensor

from mplug_nn import AttentionCore, AttentionInputs, AttentionSpec, fake, operator
from mplug_nn.parts import AttentionParts, Part
from mplug_triton.sight import Mask, sight_of

# Operators that a compiler does not look into. Triton is imported when they run, not when they are declared. torch
# reads an operator's schema from its annotated arguments, so `forward` and `backward` list them one by one.


@operator("mplug_triton::attention")
def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Optional[Tensor],  # noqa: UP045 (torch reads it)
    lengths: Optional[Tensor],  # noqa: UP045
    groups: Optional[Tensor],  # noqa: UP045
    scale: float,
    causal: bool,
    window: Optional[int],  # noqa: UP045
    soft_cap: Optional[float],  # noqa: UP045
) -> tuple[Tensor, Tensor]:
    """q [B, S, H, K], k and v [B, T, G, K] -> (output [B, S, H, K], log-sum-exp [B, H, S] in fp32, with the sinks [H]).

    The queries are the last S of the T keys. `lengths` [B, M] are those of documents, `groups` [B, S] of positions.
    """
    return _compute((q, k, v), sinks, _mask(causal, window, lengths, groups), scale, soft_cap)


@fake("mplug_triton::attention")
def _(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    b, s, h, _ = q.shape
    return q.new_empty(q.shape), q.new_empty((b, h, s), dtype=torch.float32)


@operator("mplug_triton::attention_gradient")
def backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    output: Tensor,
    sums: Tensor,
    sinks: Optional[Tensor],  # noqa: UP045
    lengths: Optional[Tensor],  # noqa: UP045
    groups: Optional[Tensor],  # noqa: UP045
    scale: float,
    causal: bool,
    window: Optional[int],  # noqa: UP045
    soft_cap: Optional[float],  # noqa: UP045
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of q [B, S, H, K], of k and v [B, T, G, K], and of sinks [H] (empty [0] without sinks).

    A sink s has the weight exp(s - log-sum-exp) and no value, so its gradient is the sum of -weight (output . grad).
    """
    from mplug_triton.attention_launch import row_sums

    grad = _plain(grad)
    inner = row_sums(output, grad)
    grads = _differentiate((q, k, v), grad, inner, sums, _mask(causal, window, lengths, groups), scale, soft_cap)
    if sinks is None:
        return *grads, q.new_empty(0)
    weights = (sinks.float()[:, None] - sums).exp()
    return *grads, -(weights * inner).sum(dim=(0, 2)).to(sinks.dtype)


@fake("mplug_triton::attention_gradient")
def _(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, output: Tensor, sums: Tensor, sinks: Tensor | None, *_: Any
) -> tuple[Tensor, ...]:
    of_sinks = q.new_empty(0) if sinks is None else sinks.new_empty(sinks.shape)
    return (*(x.new_empty(x.shape) for x in (q, k, v)), of_sinks)


class _Attention(torch.autograd.Function):
    """`forward` with the gradients of `backward`; the log-sum-exp is saved, not differentiated."""

    @staticmethod
    def forward(ctx, q, k, v, sinks, lengths, groups, *static):  # type: ignore[no-untyped-def]
        output, sums = forward(q, k, v, sinks, lengths, groups, *static)
        ctx.save_for_backward(q, k, v, output, sums, sinks, lengths, groups)
        ctx.static = static
        return output

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        saved = ctx.saved_tensors  # recomputation refuses a second access
        *of_heads, of_sinks = backward(grad, *saved, *ctx.static)
        return *of_heads, None if saved[5] is None else of_sinks, None, None, *(None for _ in ctx.static)


def _attention(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, inputs: AttentionInputs) -> Tensor:
    """Attention: q [B, S, H, K], k and v [B, T, G, K] -> [B, S, H, K], contiguous."""
    groups = inputs.position_groups if spec.causal else None  # without a causal mask, a query sees them anyway
    given = (inputs.sinks, inputs.document_lengths, groups)
    output: Tensor = _Attention.apply(  # type: ignore[no-untyped-call]
        q, k, v, *given, spec.scale, spec.causal, spec.window, spec.soft_cap
    )
    return output


class TritonParts(AttentionParts):
    """Attention by parts, with the same kernels; backward is bitwise reproducible."""

    name = "triton"

    def attend(self, part: Part) -> tuple[Tensor, Tensor]:
        """(output [B, S, H, K], log-sum-exp [B, H, S])."""
        return _compute(part[:3], None, _mask_of(part), part.scale, None)

    def differentiate(
        self, part: Part, grad: Tensor, output: Tensor, log_sum_exp: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(dq [B, S, H, K], dk and dv [B, T, G, K])."""
        from mplug_triton.attention_launch import row_sums

        grad = _plain(grad)
        inner = row_sums(_plain(output), grad)
        return _differentiate(part[:3], grad, inner, log_sum_exp, _mask_of(part), part.scale, None)


attention = AttentionCore(_attention, parts=TritonParts())


def _mask(causal: bool, window: int | None, lengths: Tensor | None, groups: Tensor | None) -> Mask:
    return Mask(causal, window, None if lengths is None else (lengths, lengths), groups)


def _mask_of(part: Part) -> Mask:
    return Mask(part.causal, lengths=part.lengths, places=part.places)


def _compute(
    heads: tuple[Tensor, Tensor, Tensor], sinks: Tensor | None, mask: Mask, scale: float, soft_cap: float | None
) -> tuple[Tensor, Tensor]:
    from mplug_triton.attention_launch import Scoring
    from mplug_triton.attention_launch import forward as launch

    q, k, v = map(_plain, heads)
    return launch((q, k, v), sinks, sight_of(mask, q.shape[1], k.shape[1], q.device), Scoring(scale, soft_cap))


def _differentiate(
    heads: tuple[Tensor, Tensor, Tensor],
    grad: Tensor,
    inner: Tensor,
    sums: Tensor,
    mask: Mask,
    scale: float,
    soft_cap: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    from mplug_triton.attention_launch import Scoring
    from mplug_triton.attention_launch import backward as launch

    q, k, v = map(_plain, heads)
    sight = sight_of(mask, q.shape[1], k.shape[1], q.device)
    return launch((q, k, v), grad, inner, sums, sight, Scoring(scale, soft_cap))


def _plain(x: Tensor) -> Tensor:
    """The tensor with consecutive rows [K], which the kernels require."""
    return x if x.stride(-1) == 1 else x.contiguous()
