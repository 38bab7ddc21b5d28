"""The supplier of `Convolution.core`, as torch operators.

B batch, S positions, C channels, W width, N samples or documents.
"""

from typing import Any, Optional

import torch
from torch import Tensor
from torch.nn.functional import pad

from mplug_fla.sequences import concatenated, sequences
from mplug_nn import ConvolutionSpec, MixerInputs, end_rows, fake, operator
from mplug_nn.mixers.specification import NOTHING


def convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None, spec: ConvolutionSpec, inputs: MixerInputs = NOTHING
) -> tuple[Tensor, Tensor | None]:
    """The arguments and results of `Convolution.core`; the end state is None unless the specification has states.

    The end state are rows of x and of the start state, so no kernel computes it.
    """
    y = _Convolution.apply(x, weight, bias, inputs.state, inputs.document_lengths, spec.silu)  # type: ignore[no-untyped-call]
    return y, end_rows(x, spec, inputs) if spec.states else None


class _Convolution(torch.autograd.Function):
    """x [B, S, C], weight [C, W], bias [C], state [B, W - 1, C] -> y [B, S, C]; its gradient -> those of the inputs."""

    @staticmethod
    def forward(ctx, x, weight, bias, state, lengths, silu):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x, weight, bias, state, lengths)
        ctx.silu = silu
        return forward_pass(x, weight, bias, state, lengths, silu)

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        x, weight, bias, state, lengths = ctx.saved_tensors
        dx, dweight, dbias, dstate = backward_pass(gradient, x, weight, bias, state, lengths, ctx.silu)
        return dx, dweight, None if bias is None else dbias, None if state is None else dstate, None, None


@operator("mplug_fla::convolution")
def forward_pass(
    x: Tensor,
    weight: Tensor,
    bias: Optional[Tensor],  # noqa: UP045 (torch reads it)
    state: Optional[Tensor],  # noqa: UP045
    lengths: Optional[Tensor],  # noqa: UP045
    silu: bool,
) -> Tensor:
    """-> y [B, S, C], contiguous."""
    from fla.modules.causal_conv1d import causal_conv1d_fwd

    with torch.cuda.device(x.device):
        y, _ = causal_conv1d_fwd(residual=None, **_arguments(x, weight, bias, state, lengths, silu))
    output: Tensor = y.reshape(x.shape)
    return output


@fake("mplug_fla::convolution")
def _(x: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape)


@operator("mplug_fla::convolution_backward")
def backward_pass(
    gradient: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Optional[Tensor],  # noqa: UP045 (torch reads it)
    state: Optional[Tensor],  # noqa: UP045
    lengths: Optional[Tensor],  # noqa: UP045
    silu: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """-> the gradients of x, weight, bias and state; empty for what there is not."""
    from fla.modules.causal_conv1d import causal_conv1d_bwd

    arguments = _arguments(x, weight, bias, state, lengths, silu)
    gradient = gradient.contiguous() if lengths is None else concatenated(gradient.contiguous())
    with torch.cuda.device(x.device):
        dx, dweight, dbias, _, dstate = causal_conv1d_bwd(dy=gradient, dht=None, residual=None, **arguments)
    if state is not None:
        dstate = dstate if lengths is None else dstate[sequences(lengths).firsts]
        dstate = dstate[..., 1:].transpose(1, 2).to(state.dtype).contiguous()  # [B, C, W] -> [B, W - 1, C]
    empty = x.new_empty(0)
    return (
        dx.reshape(x.shape).contiguous(),
        dweight,
        empty if dbias is None else dbias,
        x.new_empty(0) if state is None else dstate,
    )


@fake("mplug_fla::convolution_backward")
def _(gradient: Any, x: Tensor, weight: Tensor, bias: Any, state: Any, *_: Any) -> tuple[Tensor, ...]:
    absent = (x.new_empty(0) if one is None else one.new_empty(one.shape) for one in (bias, state))
    return (x.new_empty(x.shape), weight.new_empty(weight.shape), *absent)


def _arguments(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor | None, lengths: Tensor | None, silu: bool
) -> dict[str, Any]:
    """The library's start state has one more row in front, [N, C, W], which nothing reads."""
    cache = None if state is None else pad(state.to(x.dtype).transpose(1, 2), (1, 0))
    begins = None
    if lengths is not None:
        found = sequences(lengths)
        x, cache, begins = concatenated(x), found.spread(cache), found.begins
    return {
        "x": x,
        "weight": weight.contiguous(),
        "bias": bias,
        "initial_state": None if cache is None else cache.contiguous(),
        "activation": "silu" if silu else None,
        "cu_seqlens": begins,
    }
