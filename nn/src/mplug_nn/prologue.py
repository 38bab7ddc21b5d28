"""Products together with what computes their input: the slots `Linear.norm_product` and `Linear.activation_product`.

A prologue is a norm, with the residual addition before it, or the activation of an MLP. A block calls these slots where
a prologue is followed by one linear layer that alone reads its result. So a supplier may compute the operand of the
product directly in the format in which the product reads it. D inputs, O outputs, R ranks; [..., n, D] are a rank's
rows.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mplug.tensors.sink import Operand, Sink, Weights
from mplug_nn.gemm import NOTHING
from mplug_nn.product import Narrow
from mplug_products.delayed import Later, hand_out
from mplug_products.weight_product import WeightProduct

NORM_PRODUCT, ACTIVATION_PRODUCT = FUSED_SLOTS = ("Linear.norm_product", "Linear.activation_product")
Gradients = tuple[Tensor, Tensor | None, Tensor | None]
Saved = tuple[Tensor, ...]


@dataclass(frozen=True)
class Prologue:
    """What computes the input of a product. `kind` is that of a norm or of an activation; a norm has an `eps`."""

    kind: str
    eps: float = 0.0


class Inputs(NamedTuple):
    """The tensors that a prologue reads.

    A norm reads x and the residual stream [..., n, D] (or None), its weight [D] and its bias [D] (or None). An
    activation reads x [..., n, D] (gated: [..., n, 2D], gate first) and the bias [D or 2D] of x (or None).
    """

    x: Tensor
    residual: Tensor | None = None
    weight: Tensor | None = None
    bias: Tensor | None = None


class Upstream(NamedTuple):
    """The gradients of a fused product's results: of this rank's part of the product, and of the residual stream.

    `summed` is None for an activation.
    """

    prologue: Prologue
    y: Tensor
    summed: Tensor | None = None


class FusedProduct(WeightProduct):
    """The content of `Linear.norm_product` and `Linear.activation_product`; a supplier subclasses it.

    It is a `WeightProduct`. It computes a norm or an activation and the product of its result, and owns everything that
    backward needs. `site.needs` has the kind of the norm ('layernorm', 'rmsnorm') or of the activation ('gelu',
    'gelu_tanh', 'swiglu').
    """

    def forward(
        self, given: tuple[Prologue, Inputs], weight: Operand, narrow: Narrow, buffers: Mapping[str, Tensor]
    ) -> tuple[tuple[Tensor, Tensor | None], Saved]:
        """((this rank's part of the product, the residual stream), the tensors that `dgrad` needs).

        The residual stream is x + residual [..., n, D]; None for an activation, and for a norm without a residual.
        """
        raise NotImplementedError

    def dgrad(
        self,
        upstream: Upstream,
        weight: Operand,
        saved: Saved,
        narrow: Narrow,
        buffers: Mapping[str, Tensor],
        needs_x: bool,
    ) -> tuple[Gradients, Saved]:
        """(the gradients of x, of the norm's weight and of the bias; the operands of `wgrad`).

        The gradient of the residual stream is part of the gradient of x, which is also that of the residual. The
        gradients of tensors that the prologue does not have are None.
        """
        raise NotImplementedError

    def wgrad(self, operands: Saved, sink: Sink | None, narrow: Narrow, buffers: Mapping[str, Tensor]) -> Tensor | None:
        """Add the gradient of the product's weight [O, D] to the sink and return None; or return it without a sink."""
        raise NotImplementedError

    def operands(
        self, given: tuple[Prologue, Inputs], weight: Operand, narrow: Narrow, buffers: Mapping[str, Tensor]
    ) -> Saved:
        """The operands of `wgrad`, without memory."""
        prologue, inputs = given
        (y, summed), saved = self.forward(given, weight, narrow, buffers)
        stream = inputs.x if inputs.weight is not None and summed is None else summed
        upstream = Upstream(prologue, torch.empty_like(y), None if stream is None else torch.empty_like(stream))
        return self.dgrad(upstream, weight, saved, narrow, buffers, False)[1]


class Separate(FusedProduct):
    """The default: the block calls the prologue and the linear layer, each by its own slots."""

    def __deepcopy__(self, memo: dict[int, Any]) -> "Separate":
        """Itself: copies of a model have the same default."""
        return self


SEPARATE = Separate()


class Projected(NamedTuple):
    """The product of a module's first linear layer, without its bias, in place of the module's input."""

    values: Tensor


class _Applied(torch.autograd.Function):
    """A prologue and its product, with their gradients. Arguments and sinks are those of `mplug_nn.product`."""

    @staticmethod
    def forward(ctx, *call):  # type: ignore[no-untyped-def]
        product, prologue, gemm, before, after, own, num_taps, *tensors = call
        x, residual, norm_weight, bias, value, main_grad, stale, *rest = tensors
        rest = rest[: len(rest) - num_taps]
        weight, narrow, buffers = _arranged(product, gemm, before, after, own, value, rest)
        inputs = Inputs(x, residual, norm_weight, bias)
        (y, summed), saved = product.forward((prologue, inputs), weight, narrow, buffers)
        ctx.save_for_backward(value, *saved)
        ctx.slots = product, gemm, before, after, own
        ctx.prologue, ctx.main_grad, ctx.stale, ctx.rest = prologue, main_grad, stale, rest
        ctx.num_taps, ctx.is_norm = num_taps, norm_weight is not None
        ctx.types = tuple(None if one is None else one.dtype for one in inputs)
        if not ctx.is_norm:
            return y
        return y, x if residual is None else summed

    @staticmethod
    def backward(ctx, grad_y, grad_summed=None):  # type: ignore[no-untyped-def]
        value, *saved = ctx.saved_tensors
        product = ctx.slots[0]
        weight, narrow, buffers = _arranged(*ctx.slots, value, ctx.rest)  # type: ignore[call-arg]
        upstream = Upstream(ctx.prologue, grad_y, grad_summed)
        needs_x = any(ctx.needs_input_grad[7:11])
        grads, operands = product.dgrad(upstream, weight, tuple(saved), narrow, buffers, needs_x)
        grad_weight = None
        if ctx.needs_input_grad[11]:
            sink = None if ctx.main_grad is None else Sink(ctx.main_grad, ctx.stale)
            grad_weight = product.wgrad(operands, sink, narrow, buffers)
            operands = ()
        handed_out = hand_out(operands, ctx.num_taps)
        grad_x, of_norm, of_bias = grads
        pairs = zip((grad_x, grad_x, of_norm, of_bias), ctx.types, strict=True)
        of_inputs = (None if one is None or dtype is None else one.to(dtype) for one, dtype in pairs)
        return *[None] * 7, *of_inputs, grad_weight, None, None, *(None for _ in ctx.rest), *handed_out


def _arranged(  # type: ignore[no-untyped-def]
    product, gemm, before, after, own, value, tensors
) -> tuple[Operand, Narrow, Mapping[str, Tensor]]:
    """The weight, the boundaries and the buffers of a call; `tensors` are the buffers and the weight's copies.

    `gemm` is never called. It is an argument because torch 2.11 cannot trace the default of `Narrow`.
    """
    buffers = {name: tensors[number] for number, name in enumerate(own)}
    casts = tuple(tensors[len(own) :]) or product.cast(value, buffers)
    return Operand(value, casts), Narrow(gemm, before, after, {}), buffers


def apply_fused(
    product: FusedProduct,
    prologue: Prologue,
    inputs: Inputs,
    weight: Weights,
    narrow: Narrow,
    buffers: Mapping[str, Tensor] = NOTHING,
    casts: tuple[Tensor, ...] = (),
    later: Later | None = None,
) -> Any:
    """The product of a prologue's result; for a norm, (the product, the residual stream)."""
    stale = weight.stale
    if weight.main_grad is not None and stale is None:
        stale = torch.zeros((), dtype=torch.bool, device="cpu")
    taps = () if later is None else later.taps
    values = weight.values if later is None else weight.values.detach()
    if later is not None and later.declare is not None:
        with torch.no_grad():
            operand = Operand(values, casts or product.cast(values, buffers))
            later.declare(product.operands((prologue, inputs), operand, narrow, buffers))
    slots = product, prologue, narrow.gemm, narrow.before, narrow.after, tuple(buffers), len(taps)
    call = (*slots, *inputs, values, weight.main_grad, stale, *buffers.values(), *casts, *taps)
    return _Applied.apply(*call)  # type: ignore[no-untyped-call]
