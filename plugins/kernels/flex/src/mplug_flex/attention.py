"""The supplier of `Attention.core`, its operators, and its parts.

B batch, S queries, T keys, H query heads, G KV heads, K head dim, V value width, R reach of a relative bias.
A compiled unit has one opaque node for each call of an operator. So a form is compiled once, by the operator, and not
again by every unit that contains it.
"""

from typing import Any, Optional

import torch
from torch import Tensor

from mplug_flex.masks import Form, kept, mask_of
from mplug_flex.programs import backward_program, copies_of, forward_program
from mplug_nn import AttentionCore, AttentionInputs, AttentionSpec, fake, operator
from mplug_nn.parts import AttentionParts, Lengths, Part, Places
from mplug_nn.specification import ALIBI, RELATIVE, alibi_slopes

# torch reads an operator's schema from its annotated arguments, so `forward` and `backward` list them one by one.


@operator("mplug_flex::forward")
def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Optional[Tensor],  # noqa: UP045 (torch reads it)
    table: Optional[Tensor],  # noqa: UP045
    lengths: Optional[Tensor],  # noqa: UP045
    groups: Optional[Tensor],  # noqa: UP045
    counts: Optional[Tensor],  # noqa: UP045
    scale: float,
    causal: bool,
    window: Optional[int],  # noqa: UP045
    soft_cap: Optional[float],  # noqa: UP045
    bias: str,
    first_head: int,
    num_heads: int,
) -> tuple[Tensor, Tensor]:
    """q [B, S, H, K], k [B, T, G, K], v [B, T, G, V] -> (output [B, S, H, V], log-sum-exp [B, H, S] with the sinks)."""
    pair = _lengths(q, k, lengths, counts)
    form = Form(scale, causal, window, soft_cap, bias, pair is not None, groups is not None)
    return _compute(form, (q, k, v), pair, sinks, _bias(form, q, table, first_head, num_heads), groups)


@fake("mplug_flex::forward")
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    b, s, h, _ = q.shape
    wide = torch.promote_types(q.dtype, torch.float32)
    return q.new_empty((b, s, h, v.shape[-1])), q.new_empty((b, h, s), dtype=wide)


@operator("mplug_flex::backward")
def backward(
    gradient: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    output: Tensor,
    sums: Tensor,
    sinks: Optional[Tensor],  # noqa: UP045
    table: Optional[Tensor],  # noqa: UP045
    lengths: Optional[Tensor],  # noqa: UP045
    groups: Optional[Tensor],  # noqa: UP045
    counts: Optional[Tensor],  # noqa: UP045
    scale: float,
    causal: bool,
    window: Optional[int],  # noqa: UP045
    soft_cap: Optional[float],  # noqa: UP045
    bias: str,
    first_head: int,
    num_heads: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of q, k, v, sinks [H] and table [H, 2R + 1]; the last two are empty if there is no such tensor."""
    pair = _lengths(q, k, lengths, counts)
    form = Form(scale, causal, window, soft_cap, bias, pair is not None, groups is not None)
    added = _bias(form, q, table, first_head, num_heads)
    dq, dk, dv, of_sinks, of_bias = _differentiate(form, (q, k, v), pair, gradient, output, sums, sinks, added, groups)
    return dq, dk, dv, of_sinks, of_bias if table is None else of_bias.to(table.dtype)


@fake("mplug_flex::backward")
def _(
    gradient: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    output: Tensor,
    sums: Tensor,
    sinks: Tensor | None,
    table: Tensor | None,
    *_: Any,
) -> tuple[Tensor, ...]:
    optional = (q.new_empty(0) if x is None else x.new_empty(x.shape) for x in (sinks, table))
    return (*(x.new_empty(x.shape) for x in (q, k, v)), *optional)


class _Attention(torch.autograd.Function):
    """`forward` with the gradients of `backward`; the log-sum-exp is saved, not differentiated."""

    @staticmethod
    def forward(ctx, q, k, v, sinks, table, lengths, groups, counts, *static):  # type: ignore[no-untyped-def]
        output, sums = forward(q, k, v, sinks, table, lengths, groups, counts, *static)
        ctx.save_for_backward(q, k, v, output, sums, sinks, table, lengths, groups, counts)
        ctx.static = static
        return output

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        saved = ctx.saved_tensors  # recomputation refuses a second access
        sinks, table = saved[5:7]
        *grads, of_sinks, of_table = backward(gradient, *saved, *ctx.static)
        optional = (None if sinks is None else of_sinks, None if table is None else of_table)
        return *grads, *optional, None, None, None, *(None for _ in ctx.static)


def _attention(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, inputs: AttentionInputs) -> Tensor:
    """Attention by flex_attention: q [B, S, H, K], k [B, T, G, K] and v [B, T, G, V] -> [B, S, H, V], contiguous."""
    table = inputs.bias_table if spec.bias == RELATIVE else None
    groups = inputs.position_groups if spec.causal else None  # without a causal mask, a query sees them anyway
    static = (spec.scale, spec.causal, spec.window, spec.soft_cap, spec.bias, inputs.first_head, inputs.num_heads or 0)
    output: Tensor = _Attention.apply(  # type: ignore[no-untyped-call]
        q, k, v, inputs.sinks, table, inputs.document_lengths, groups, inputs.key_counts, *static
    )
    return output


class FlexParts(AttentionParts):
    """Attention by parts, with the same programs; a form here is a full or a causal part, or one with places."""

    name = "flex"

    def attend(self, part: Part) -> tuple[Tensor, Tensor]:
        """(output [B, S, H, K], log-sum-exp [B, H, S])."""
        return _compute(_form_of(part), part[:3], part.lengths, None, part.q.new_empty(0), places=part.places)

    def differentiate(
        self, part: Part, grad: Tensor, output: Tensor, log_sum_exp: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(dq [B, S, H, K], dk and dv [B, T, G, K])."""
        nothing = part.q.new_empty(0)
        dq, dk, dv, *_ = _differentiate(
            _form_of(part), part[:3], part.lengths, grad, output, log_sum_exp, None, nothing, places=part.places
        )
        return dq, dk, dv


attention = AttentionCore(_attention, parts=FlexParts())


def _lengths(q: Tensor, k: Tensor, documents: Tensor | None, counts: Tensor | None) -> Lengths | None:
    """The lengths of the segments of queries and of keys; of keys with padding, the padding is a segment of its own."""
    if counts is None:
        return None if documents is None else (documents, documents)
    of_queries = torch.stack((torch.full_like(counts, q.shape[1]), torch.zeros_like(counts)), dim=1)
    return of_queries, torch.stack((counts, k.shape[1] - counts), dim=1)


def _form_of(part: Part) -> Form:
    packed, places = part.lengths is not None, part.places
    if places is None:
        return Form(part.scale, part.causal, packed=packed)
    grouped = part.causal and places.groups is not None
    return Form(part.scale, part.causal, places.window, packed=packed, grouped=grouped, placed=True)


def _bias(form: Form, q: Tensor, table: Tensor | None, first_head: int, num_heads: int) -> Tensor:
    """The slopes [H] or the table [H, 2R + 1] in at least fp32, in which gradients are summed; empty without a bias."""
    wide = torch.promote_types(q.dtype, torch.float32)
    if form.bias == RELATIVE and table is not None:
        return table.detach().to(wide)
    if form.bias == ALIBI and num_heads:
        own = (first_head, first_head + q.shape[2])
        key = (ALIBI, *own, num_heads, wide, q.device)
        return kept(key, lambda: alibi_slopes(torch.arange(*own, device=q.device), num_heads).to(wide), q.device)
    if form.bias:
        raise ValueError(f"attention has a bias '{form.bias}', which flex does not know, or not without its inputs")
    return q.new_empty(0)


def _compute(
    form: Form,
    heads: tuple[Tensor, ...],
    lengths: Any,
    sinks: Tensor | None,
    bias: Tensor,
    groups: Tensor | None = None,
    places: Places | None = None,
) -> tuple[Tensor, Tensor]:
    q, k, v = map(_plain, heads)
    sinks = q.new_empty(0) if sinks is None else _plain(sinks)
    mask = mask_of(form, q.shape[1], k.shape[1], lengths, q.device, groups, places)
    program = forward_program(form, mask, q, k, v, sinks, bias)
    with torch.no_grad():
        output, sums = program(q, k, v, sinks, bias, *mask.numbers, *mask.tensors)
    return output, sums


def _differentiate(
    form: Form,
    heads: tuple[Tensor, ...],
    lengths: Any,
    gradient: Tensor,
    output: Tensor,
    sums: Tensor,
    sinks: Tensor | None,
    bias: Tensor,
    groups: Tensor | None = None,
    places: Places | None = None,
) -> tuple[Tensor, ...]:
    """The gradients of q, k, v, sinks and bias; the last two are empty if the form has none."""
    trained = form.bias == RELATIVE
    added = copies_of(bias, heads[0].shape[1]) if trained else bias.detach()
    given = [_plain(x) for x in (*heads, output, sums, gradient)]
    own = (*given, output.new_empty(0) if sinks is None else _plain(sinks), added)
    mask = mask_of(form, heads[0].shape[1], heads[1].shape[1], lengths, output.device, groups, places)
    program = backward_program(form, mask, own, trained)
    with torch.no_grad():
        return program(*own, *mask.numbers, *mask.tensors)


def _plain(x: Tensor) -> Tensor:
    """The same values without a gradient, and with consecutive elements in a row, which the kernels require."""
    return x.detach() if x.stride(-1) == 1 else x.detach().contiguous()
