"""The suppliers of `Scan.core`, as torch operators, so that a compiler keeps each pass as one node of its graph.

B batch, S positions, G key heads, H value heads, K key width, V value width, M documents of a sample, C rows of a
chunk. The kernels compute products in bf16 with sums in fp32. Decays, their sums, and start and end states are fp32.
"""

from dataclasses import replace
from typing import Any, Optional

import torch
from torch import Tensor

from mplug_fla.library import SHARED_KEYS, Call, Passed, backward, chunk_of, forward
from mplug_fla.sequences import concatenated, sequences
from mplug_nn import MixerInputs, ScanSpec, fake, operator
from mplug_nn.mixers.specification import CHANNEL_DECAY, CHANNEL_DELTA, DECAY, NOTHING

# torch reads an operator's schema from its annotated arguments, so the two operators list them one by one.


def scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    write: Tensor | None,
    spec: ScanSpec,
    inputs: MixerInputs = NOTHING,
) -> tuple[Tensor, Tensor | None]:
    """The arguments and results of `Scan.core`; the end state is None unless the specification has states.

    The format of the kernels' products is the narrowest of q, k and v.
    """
    narrow = v.dtype
    for x in (q, k):
        narrow = x.dtype if x.dtype.itemsize < narrow.itemsize else narrow
    sharers = 1 if spec.kind in SHARED_KEYS else v.shape[2] // k.shape[2]
    q, k = (x.repeat_interleave(sharers, dim=2) if sharers > 1 else x for x in (q, k))
    y, end = _Scan.apply(  # type: ignore[no-untyped-call]
        *(x.to(narrow).contiguous() for x in (q, k, v)),
        decay.float().contiguous(),
        None if write is None else write.contiguous(),
        None if inputs.state is None else inputs.state.float().contiguous(),
        inputs.document_lengths,
        (spec.kind, spec.scale, spec.states),
    )
    return y.to(v.dtype), end if spec.states else None


def scan_by_channel(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    write: Tensor | None,
    spec: ScanSpec,
    inputs: MixerInputs = NOTHING,
) -> tuple[Tensor, Tensor | None]:
    """A scan with one decay per head by the kernels for decays of channels, with its arguments and results."""
    kind = CHANNEL_DECAY if spec.kind == DECAY else CHANNEL_DELTA
    widened = decay[..., None].expand(*decay.shape, k.shape[-1])
    return scan(q, k, v, widened, write, replace(spec, kind=kind), inputs)


class _Scan(torch.autograd.Function):
    """q, k, v, decay, write, state -> (y, end state); their gradients -> those of the inputs, each of its shape."""

    @staticmethod
    def forward(ctx, q, k, v, decay, write, state, lengths, options):  # type: ignore[no-untyped-def]
        kind, scale, needs_end = options
        y, end, *saved = forward_pass(kind, q, k, v, decay, write, state, lengths, scale, needs_end)
        ctx.save_for_backward(q, k, v, write, state, lengths, *saved)
        ctx.options = options
        ctx.set_materialize_grads(False)
        return y, end

    @staticmethod
    def backward(ctx, gradient, end_gradient):  # type: ignore[no-untyped-def]
        kind, scale, _ = ctx.options
        q, k, v, write, state, lengths, *saved = ctx.saved_tensors
        if gradient is None:
            gradient = torch.zeros_like(v)
        if not ctx.options[2]:  # a compiler hands over zeros for the gradient of the empty end state
            end_gradient = None
        *found, dwrite, dstate = backward_pass(
            kind, gradient, end_gradient, q, k, v, write, state, lengths, *saved, scale
        )
        dwrite = None if write is None else dwrite
        return *found, dwrite, None if state is None else dstate, None, None


@operator("mplug_fla::scan")
def forward_pass(
    kind: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    write: Optional[Tensor],  # noqa: UP045 (torch reads it)
    state: Optional[Tensor],  # noqa: UP045
    lengths: Optional[Tensor],  # noqa: UP045
    scale: float,
    needs_end: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """-> y [B, S, H, V], end state [B, H, K, V], sums of decays, and [B, S, H, C] twice; empty if not needed."""
    call, batch = _call(kind, q, k, v, write, state, lengths, scale), len(q)
    passed = forward(call, decay if lengths is None else concatenated(decay), needs_end)
    end = passed.end
    if end is not None and lengths is not None:
        end = end[sequences(lengths).lasts]
    return (
        passed.y.to(v.dtype).unflatten(1, (-1, q.shape[1])).flatten(0, 1).contiguous(),
        v.new_empty(0) if end is None else end,
        *(
            v.new_empty(0) if x is None else x.reshape(batch, -1, *x.shape[2:])
            for x in (passed.sums, passed.scores, passed.solved)
        ),
    )


@fake("mplug_fla::scan")
def _(
    kind: str, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, write: Any, state: Any, lengths: Any, *options: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    _, needs_end = options
    batch, length, heads, width = v.shape
    rows = batch * length if lengths is not None else length
    products = batch, length, heads, chunk_of(kind, rows)
    end = v.new_empty((batch, heads, k.shape[-1], width), dtype=torch.float32) if needs_end else v.new_empty(0)
    scores, solved = v.new_empty(0), v.new_empty(0)
    if kind == CHANNEL_DECAY:
        scores = v.new_empty(products, dtype=torch.float32)
    elif kind != DECAY:
        solved = v.new_empty(products)
        scores = v.new_empty(products) if kind == CHANNEL_DELTA else v.new_empty(0)
    return v.new_empty(v.shape), end, decay.new_empty(decay.shape), scores, solved


@operator("mplug_fla::scan_backward")
def backward_pass(
    kind: str,
    gradient: Tensor,
    end_gradient: Optional[Tensor],  # noqa: UP045 (torch reads it)
    q: Tensor,
    k: Tensor,
    v: Tensor,
    write: Optional[Tensor],  # noqa: UP045
    state: Optional[Tensor],  # noqa: UP045
    lengths: Optional[Tensor],  # noqa: UP045
    sums: Tensor,
    scores: Tensor,
    solved: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """-> the gradients of q, k, v, decay, write and state; empty for what there is not."""
    call = _call(kind, q, k, v, write, state, lengths, scale)
    gradient, sums, scores, solved = (
        gradient.to(v.dtype).contiguous(),
        *(x.contiguous() for x in (sums, scores, solved)),
    )
    end_gradient = None if end_gradient is None else end_gradient.float().contiguous()
    if lengths is not None:
        gradient, sums, scores, solved = (concatenated(x) if x.numel() else x for x in (gradient, sums, scores, solved))
        end_gradient = sequences(lengths).spread_last(end_gradient)
    found = backward(call, Passed(gradient, None, sums, scores, solved), gradient, end_gradient)
    dstate = found[-1]
    if dstate is not None and lengths is not None:
        dstate = dstate[sequences(lengths).firsts]
    like = q, k, v, torch.empty(decay_shape(kind, q, v), dtype=torch.float32, device="meta"), write, state
    shaped = [
        v.new_empty(0) if x is None or y is None else x.to(y.dtype).reshape(y.shape).contiguous()
        for x, y in zip((*found[:-1], dstate), like, strict=True)
    ]
    return tuple(shaped)  # type: ignore[return-value]


@fake("mplug_fla::scan_backward")
def _(
    kind: str, gradient: Any, end_gradient: Any, q: Tensor, k: Tensor, v: Tensor, write: Any, state: Any, *_: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    return (  # type: ignore[return-value]
        *(x.new_empty(x.shape) for x in (q, k, v)),
        v.new_empty(decay_shape(kind, q, v), dtype=torch.float32),
        *(v.new_empty(0) if x is None else x.new_empty(x.shape) for x in (write, state)),
    )


def decay_shape(kind: str, q: Tensor, v: Tensor) -> tuple[int, ...]:
    """[B, S, H], or by channel [B, S, H, K]."""
    shape = tuple(v.shape[:3])
    return (*shape, q.shape[-1]) if kind in (CHANNEL_DECAY, CHANNEL_DELTA) else shape


def _call(
    kind: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    write: Tensor | None,
    state: Tensor | None,
    lengths: Tensor | None,
    scale: float,
) -> Call:
    q, k, v = (x.contiguous() for x in (q, k, v))
    write = None if write is None else write.contiguous()
    if lengths is None:
        return Call(kind, q, k, v, write, scale, state, None)
    found = sequences(lengths)
    q, k, v = (concatenated(x) for x in (q, k, v))
    write = None if write is None else concatenated(write)
    return Call(kind, q, k, v, write, scale, found.spread(state), found.begins)
