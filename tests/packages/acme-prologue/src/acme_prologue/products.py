"""The supplier. D inputs, O outputs; [..., n, D] are a rank's rows."""

from collections.abc import Mapping

import torch
from torch import Tensor

from mplug_nn import FusedProduct, Inputs, Narrow, Operand, Prologue, Sink, Upstream, add_product, keep_max

Buffers = Mapping[str, Tensor]


class Again(FusedProduct):
    """The product of a norm's or an activation's result; keeps only what the norm or the activation reads."""

    def cast(self, weight: Tensor, buffers: Buffers) -> tuple[Tensor, ...]:
        """The transposed weight."""
        return (weight.t().contiguous(),)

    def forward(
        self, given: tuple[Prologue, Inputs], weight: Operand, narrow: Narrow, buffers: Buffers
    ) -> tuple[tuple[Tensor, Tensor | None], tuple[Tensor, ...]]:
        """(the product, the residual stream, what the prologue reads)."""
        prologue, inputs = given
        x, residual, norm_weight, bias = inputs
        read = x if residual is None else x + residual
        weights = [one for one in (norm_weight, bias) if one is not None]
        result = _result(prologue, read, weights)
        keep_max(buffers["largest"], result.abs().amax())
        y = narrow.scattered(narrow.gathered(result) @ weight.casts[0])
        return (y, None if residual is None else read), (read, *weights)

    def dgrad(
        self,
        upstream: Upstream,
        weight: Operand,
        saved: tuple[Tensor, ...],
        narrow: Narrow,
        buffers: Buffers,
        needs_x: bool,
    ) -> tuple[tuple[Tensor, Tensor | None, Tensor | None], tuple[Tensor, ...]]:
        """(the gradients of what the prologue reads; the gradient of the product and the prologue's result)."""
        prologue, grad_y, grad_summed = upstream
        grad_y = narrow.gathered_gradient(grad_y)
        grad = narrow.scattered_gradient(grad_y @ weight.casts[0].t())
        read, *weights = saved
        operands = grad_y, _result(prologue, read, weights)
        if grad_summed is None:
            return _of_activation(prologue, grad, read, weights), operands
        grad_read, *grads = _of_norm(prologue, grad, read, weights)
        return (grad_read + grad_summed, grads[0], grads[1]), operands

    def wgrad(self, operands: tuple[Tensor, ...], sink: Sink | None, narrow: Narrow, buffers: Buffers) -> Tensor | None:
        """The weight's gradient."""
        grad_y, result = operands
        a, b = grad_y.flatten(0, -2).t(), narrow.gathered(result).flatten(0, -2)
        if sink is None:
            return a @ b
        add_product(*sink, a, b)
        return None


def _result(prologue: Prologue, read: Tensor, weights: list[Tensor]) -> Tensor:
    if prologue.kind in ("layernorm", "rmsnorm"):
        scaled, _ = _scaled(prologue, read)
        return scaled * weights[0] + (weights[1] if len(weights) > 1 else 0)
    h = read + weights[0] if weights else read
    if prologue.kind == "gelu":
        return h * _below(h)
    gate, up = h.chunk(2, dim=-1)
    return gate * gate.sigmoid() * up


def _scaled(prologue: Prologue, read: Tensor) -> tuple[Tensor, Tensor]:
    """(the norm without its weights, the reciprocal deviations)."""
    centred = read - read.mean(-1, keepdim=True) if prologue.kind == "layernorm" else read
    deviation = torch.rsqrt((centred * centred).mean(-1, keepdim=True) + prologue.eps)
    return centred * deviation, deviation


def _of_norm(
    prologue: Prologue, grad: Tensor, read: Tensor, weights: list[Tensor]
) -> tuple[Tensor, Tensor, Tensor | None]:
    scaled, deviation = _scaled(prologue, read)
    g = grad * weights[0]
    inner = g - scaled * (g * scaled).mean(-1, keepdim=True)
    if prologue.kind == "layernorm":
        inner = inner - g.mean(-1, keepdim=True)
    of_bias = grad.flatten(0, -2).sum(0) if len(weights) > 1 else None
    return inner * deviation, (grad * scaled).flatten(0, -2).sum(0), of_bias


def _below(h: Tensor) -> Tensor:
    return 0.5 * (1 + torch.erf(h * 2**-0.5))


def _of_activation(
    prologue: Prologue, grad: Tensor, read: Tensor, weights: list[Tensor]
) -> tuple[Tensor, None, Tensor | None]:
    h = read + weights[0] if weights else read
    if prologue.kind == "gelu":
        found = grad * (_below(h) + h * torch.exp(-0.5 * h * h) * (2 * torch.pi) ** -0.5)
    else:
        gate, up = h.chunk(2, dim=-1)
        below = gate.sigmoid()
        silu = gate * below
        found = torch.cat((grad * up * (below + silu * (1 - below)), grad * silu), dim=-1)
    return found, None, found.flatten(0, -2).sum(0) if weights else None


def step_ended(stacked: Buffers) -> dict[str, Tensor]:
    """The largest result of the step is that of the last step."""
    return {"last": stacked["largest"]}
