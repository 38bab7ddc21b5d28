"""Ulysses in chunks of heads, as torch operators: attention of a chunk hides the exchanges of its neighbours.

B batch, S sequence, R ranks, n chunks, K head dim. A rank has H/R query heads and G/R KV heads of the whole sequence; a
chunk has h and g of them, 1/n. One message has the queries, keys and values of a chunk.

    forward    chunk      [R, B, S/R, h + 2g, K] -> [B, S, h + 2g, K]     while the chunk before attends
               output     [B, S, h, K] -> [R, B, S/R, h, K]               while the next chunk attends
    backward   the same with gradients: that of the output, then those of queries, keys and values

The first chunk's arrival and the last one's departure are not hidden: an n-th of all exchanges.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

import mplug_ops as ops
from mplug_cp.exchange import HEADS, copies_of_kv
from mplug_cp.swaps import Coming, Leaving, swaps_of
from mplug_cp.totals import gradient_of_sinks, weigh_with_sinks, wide
from mplug_nn import AttentionInputs, AttentionParts, AttentionSpec, parts_of
from mplug_ops.transfers import group_named
from mplug_ops.words import put

Operator = Callable[..., tuple[Tensor, ...]]
ARGUMENTS = "Tensor? documents, Tensor? sinks, float scale, bool causal, int chunks, str group"


def chunked(
    group: ops.Group, size: int, index: int, chunks: int, inner: Callable[..., Tensor]
) -> Callable[..., Tensor]:
    """Wrap `inner`, which has parts, into a core over a part of the sequence; `group` has `size` ranks."""
    if group is None:  # no processes yet: the core is never called
        return inner
    operator, name = operator_of_chunks(parts_of(inner)), group.group_name

    def core(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, inputs: AttentionInputs) -> Tensor:
        """q [B, S/R, H, K], k and v [B, S/R, G, K] -> [B, S/R, H, K]."""
        copies = copies_of_kv(q.shape[HEADS], k.shape[HEADS], size)
        k, v = (x.repeat_interleave(copies, dim=HEADS) if copies > 1 else x for x in (k, v))
        heads = q.shape[HEADS] // size
        sinks = None if inputs.sinks is None else inputs.sinks[index * heads : (index + 1) * heads]
        number = chunks if k.shape[HEADS] // size % chunks == 0 else 1
        return operator(q, k, v, inputs.document_lengths, sinks, spec.scale, spec.causal, number, name)[0]

    return core


def _for_ranks(x: Tensor, size: int, chunks: int, number: int) -> Tensor:
    """The heads of a chunk, for every rank: a view of x [B, S/R, H, K] as [R, B, S/R, h, K]."""
    return x.unflatten(HEADS, (size, chunks, -1))[:, :, :, number].movedim(2, 0)


def _whole(x: Tensor) -> Tensor:
    """What came from all ranks [R, B, S/R, h, K], as whole sequences [B, S, h, K]; no copy if B is 1."""
    return x.movedim(0, 1).flatten(1, 2)


def _parts(x: Tensor, size: int) -> Tensor:
    """The inverse, a view: [B, S, h, K] -> [R, B, S/R, h, K]."""
    return x.unflatten(1, (size, -1)).movedim(1, 0)


def _put(totals: Sequence[Tensor], leaving: Leaving, chunks: int, number: int) -> None:
    """Write the heads of a chunk that all ranks give back into tensors [B, S/R, H, K], when they have arrived."""
    with leaving.arrived() as parts:
        for total, ranks in zip(totals, parts, strict=True):
            for place, part in zip(_for_ranks(total, len(ranks), chunks, number), ranks, strict=True):
                put(place, part)


def _stacked(xs: list[Tensor], dtype: torch.dtype) -> Tensor:
    """The tensors of all chunks as one, contiguous; without a copy if there is one, and it is."""
    return xs[0].to(dtype).contiguous()[None] if len(xs) == 1 else torch.stack([x.to(dtype) for x in xs])


def _of_chunk(sinks: Tensor | None, chunks: int, number: int) -> Tensor | None:
    return None if sinks is None else sinks.unflatten(0, (chunks, -1))[number]


def _attend(parts: AttentionParts, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    """(output [B, S/R, H, K]; for backward: messages [n, R, B, S/R, h + 2g, K], outputs, log-sum-exps)."""
    documents, sinks, scale, causal, chunks, name = rest
    swaps, size = swaps_of(name), group_named(name).size()
    output, messages = _shapes(q, k, v, *rest)[:2]
    lengths = None if documents is None else (documents, documents)
    heads = [x.shape[HEADS] // size // chunks for x in (q, k, v)]

    def started(number: int) -> Coming:
        return swaps.start([_for_ranks(x, size, chunks, number) for x in (q, k, v)], messages[number])

    coming, leaving, outputs, sums = started(0), list[Leaving](), list[Tensor](), list[Tensor]()
    for number in range(chunks):
        following = started(number + 1) if number + 1 < chunks else None
        own = _whole(coming.wait()).split(heads, dim=HEADS)
        mixed, sum_ = parts.forward(*own, scale=scale, causal=causal, lengths=lengths)
        if (of_chunk := _of_chunk(sinks, chunks, number)) is not None:
            mixed = mixed.to(wide(q), copy=True)
            sum_ = weigh_with_sinks(mixed, sum_, of_chunk)
        outputs.append(mixed.to(q.dtype).contiguous())
        sums.append(sum_)
        leaving.append(swaps.give_back([_parts(outputs[-1], size)]))
        if number:  # attention of this chunk has hidden it
            _put([output], leaving[number - 1], chunks, number - 1)
        coming = following
    _put([output], leaving[-1], chunks, chunks - 1)
    return output, messages, _stacked(outputs, q.dtype), _stacked(sums, wide(q))


def _differentiate(
    parts: AttentionParts, grad: Tensor, messages: Tensor, outputs: Tensor, sums: Tensor, *rest: Any
) -> tuple[Tensor, ...]:
    documents, sinks, scale, causal, chunks, name = rest
    swaps, size = swaps_of(name), group_named(name).size()
    lengths = None if documents is None else (documents, documents)
    found, of_sinks = _backward_shapes(grad, messages, outputs, sums, *rest), []
    heads = [x.shape[HEADS] // size // chunks for x in found[:3]]

    def started(number: int) -> Coming:
        x = _for_ranks(grad, size, chunks, number)
        return swaps.start([x], torch.empty_like(x, memory_format=torch.contiguous_format))

    coming, leaving = started(0), list[Leaving]()
    for number in range(chunks):
        following = started(number + 1) if number + 1 < chunks else None
        own, of_output = _whole(messages[number]).split(heads, dim=HEADS), _whole(coming.wait())
        gradients = parts.backward(
            of_output, *own, outputs[number], sums[number], scale=scale, causal=causal, lengths=lengths
        )
        leaving.append(swaps.give_back([_parts(x, size) for x in gradients]))
        of_chunk = _of_chunk(sinks, chunks, number)
        of_sinks.append(gradient_of_sinks(of_chunk, of_output, outputs[number], sums[number]))
        if number:
            _put(found[:3], leaving[number - 1], chunks, number - 1)
        coming = following
    _put(found[:3], leaving[-1], chunks, chunks - 1)
    return *found[:3], torch.cat(of_sinks)


@cache
def operator_of_chunks(parts: AttentionParts) -> Operator:
    """The operator of a supplier's parts; its dual: grad [B, S/R, H, K] -> dq, dk, dv and the sinks' gradient.

    Forward exchanges q, k, v and the output; backward exchanges their gradients the other way.
    """

    def forward(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        return _attend(parts, q, k, v, *rest)

    def backward(grad: Tensor, messages: Tensor, outputs: Tensor, sums: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        return _differentiate(parts, grad, messages, outputs, sums, *rest)

    saved = "Tensor grad, Tensor messages, Tensor outputs, Tensor sums"
    of_forward: Any = torch.library.custom_op(
        f"mplug_cp::chunks_{parts.name}",
        forward,
        mutates_args=(),
        schema=f"(Tensor q, Tensor k, Tensor v, {ARGUMENTS}) -> (Tensor, Tensor, Tensor, Tensor)",
    )
    of_backward: Any = torch.library.custom_op(
        f"mplug_cp::chunks_{parts.name}_backward",
        backward,
        mutates_args=(),
        schema=f"({saved}, {ARGUMENTS}) -> (Tensor, Tensor, Tensor, Tensor)",
    )

    def differentiate(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        *kept, documents, sinks = ctx.saved_tensors  # recomputation refuses a second access
        *of_heads, of_sinks = of_backward(grad, *kept, documents, sinks, *ctx.rest)
        return *of_heads, None, None if sinks is None else of_sinks, None, None, None, None

    def keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        documents, sinks, *ctx.rest = inputs[3:]
        ctx.save_for_backward(*output[1:], documents, sinks)

    of_forward.register_fake(_shapes)
    of_backward.register_fake(_backward_shapes)
    of_forward.register_autograd(differentiate, setup_context=keep)
    operator: Operator = of_forward
    return operator


def _shapes(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    *_, chunks, name = rest
    size, (b, length, heads, width) = group_named(name).size(), q.shape
    each, every = heads // size // chunks, sum(x.shape[HEADS] for x in (q, k, v)) // size // chunks
    return (
        q.new_empty(q.shape),
        q.new_empty((chunks, size, b, length, every, width)),
        q.new_empty((chunks, b, size * length, each, width)),
        q.new_empty((chunks, b, each, size * length), dtype=wide(q)),
    )


def _backward_shapes(grad: Tensor, messages: Tensor, outputs: Tensor, sums: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    sinks, (chunks, size) = rest[1], messages.shape[:2]
    groups = (messages.shape[4] - outputs.shape[3]) // 2 * chunks * size
    of_keys = (*grad.shape[:2], groups, grad.shape[3])
    of_sinks = grad.new_empty(0) if sinks is None else sinks.new_empty(sinks.shape)
    return grad.new_empty(grad.shape), grad.new_empty(of_keys), grad.new_empty(of_keys), of_sinks
