"""Activations together with the product of their result, by delayed scaling: suppliers of `Linear.activation_product`.

Transformer Engine's activation kernels write fp8 numbers if the scale is known. The activation's result in bf16 never
exists. Forward saves what the activation reads, and backward computes the fp8 numbers from it again. N rows, D inputs
of the product, P padded rows; x is [N, D], or [N, 2 D] for a gated activation (gate first).
"""

import torch
from torch import Tensor

from mplug_nn import DelayedScaling, Inputs, Narrow, Operand, Prologue, Upstream, fake, keep_max, operator
from mplug_te.casts import padded, transposed
from mplug_te.fusion import Buffers, DelayedFusion, Saved, rows_of
from mplug_te.library import library, number_of
from mplug_te.recipes import INPUT

FUNCTIONS = {"gelu_tanh": "gelu", "geglu_tanh": "geglu", "relu2": "srelu", "swiglu": "swiglu"}
"""Kind -> the name of Transformer Engine's kernel; its GELU is that by tanh."""
GATED = ("geglu_tanh", "swiglu")


@operator("mplug_te::quantised_activation")
def quantised_activation(x: Tensor, kind: str, scale: Tensor, format_name: str) -> tuple[Tensor, Tensor, Tensor]:
    """x -> (the activation in fp8 [N, D], inverse [1], largest absolute value [1])."""
    return _quantised(x, kind, scale, format_name)


def _quantised(x: Tensor, kind: str, scale: Tensor, format_name: str) -> tuple[Tensor, Tensor, Tensor]:
    te, number = library().te, number_of(getattr(torch, format_name))
    largest = torch.zeros(1, dtype=torch.float32, device=x.device)
    quantizer = te.Float8Quantizer(scale, largest, number, rowwise=True, columnwise=False)
    quantizer.internal = True
    if not len(x):
        return _empty(x, kind)[0], torch.reciprocal(scale), largest
    found = getattr(library().tex, FUNCTIONS[kind])(x.contiguous(), quantizer)
    return found._data, found._scale_inv, largest


@fake("mplug_te::quantised_activation")
def _(x: Tensor, kind: str, scale: Tensor, format_name: str) -> tuple[Tensor, Tensor, Tensor]:
    return _empty(x, kind)


def _empty(x: Tensor, kind: str) -> tuple[Tensor, Tensor, Tensor]:
    one = x.new_empty(1, dtype=torch.float32)
    return x.new_empty((x.shape[0], width_of(x, kind)), dtype=torch.uint8), one, torch.empty_like(one)


def width_of(x: Tensor, kind: str) -> int:
    """The number of columns of the activation of x."""
    return x.shape[1] // (2 if kind in GATED else 1)


@operator("mplug_te::activation_gradient")
def activation_gradient(
    grad: Tensor, x: Tensor, kind: str, scale: Tensor, format_name: str, columns: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient of the activation [N, D] -> (that of x, the numbers of `quantised_activation`, inverse [1]).

    The numbers are columns [D, P] if asked for, else rows [N, D].
    """
    rows, inverse, _ = _quantised(x, kind, scale, format_name)
    numbers = transposed(rows) if columns else rows
    if not len(x):
        return torch.empty_like(x), numbers, inverse
    derivative = getattr(library().tex, f"d{FUNCTIONS[kind]}")
    return derivative(grad.contiguous(), x.contiguous(), None), numbers, inverse


@fake("mplug_te::activation_gradient")
def _(
    grad: Tensor, x: Tensor, kind: str, scale: Tensor, format_name: str, columns: bool
) -> tuple[Tensor, Tensor, Tensor]:
    rows, inverse, _ = _empty(x, kind)
    numbers = rows.new_empty((rows.shape[1], padded(rows.shape[0]))) if columns else rows
    return x.new_empty(x.shape), numbers, inverse


class ActivationProduct(DelayedFusion):
    """The activation of an MLP, after the bias of the up projection, and the product of its result.

    The bias is added in bf16 before, as without this supplier; backward then keeps the sum instead of the projection.
    """

    def forward(
        self, given: tuple[Prologue, Inputs], weight: Operand, narrow: Narrow, buffers: Buffers
    ) -> tuple[tuple[Tensor, Tensor | None], Saved]:
        """(the product, None, what the activation reads)."""
        prologue, inputs = given
        x = inputs.x if inputs.bias is None else inputs.x + inputs.bias
        scale = buffers[DelayedScaling.scale_name(INPUT)]
        rows, inverse, largest = quantised_activation(rows_of(x), prologue.kind, scale, self.product.forward_format)
        keep_max(buffers[INPUT], largest.view(()))
        part = rows.view(*x.shape[:-1], rows.shape[1])
        y = self.product.multiplied(narrow.gathered(part), inverse, weight, x.dtype)
        has_bias = [] if inputs.bias is None else [inputs.bias]
        return (narrow.scattered(y), None), (x, *has_bias)

    def dgrad(
        self,
        upstream: Upstream,
        weight: Operand,
        saved: Saved,
        narrow: Narrow,
        buffers: Buffers,
        needs_x: bool,
    ) -> tuple[tuple[Tensor, Tensor | None, Tensor | None], Saved]:
        """(the gradients of x and of its bias; the operands of `wgrad`)."""
        prologue, grad_y, _ = upstream
        x, *bias = saved
        grad, of_gradient = self.product.dgrad(grad_y, weight, (), narrow, buffers, True)
        assert grad is not None
        scale, whole = buffers[DelayedScaling.scale_name(INPUT)], narrow.before is None
        form = self.product.forward_format
        of_x, numbers, inverse = activation_gradient(rows_of(grad), rows_of(x), prologue.kind, scale, form, whole)
        kept = numbers if whole else numbers.view(*x.shape[:-1], numbers.shape[1])
        of_bias = of_x.sum(dim=0).to(bias[0].dtype) if bias else None
        return (of_x.view(x.shape), None, of_bias), (*of_gradient, kept, inverse)
