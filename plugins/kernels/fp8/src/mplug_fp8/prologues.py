"""Norms and activations together with the product of their result, by delayed scaling.

The scale of the product's input is known before the step. So one kernel computes the norm or the activation and writes
fp8 numbers; its result in bf16 never exists. Forward keeps what the prologue reads, which its own backward needs
anyway. Backward computes the columns that the weight's gradient reads from it again.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from mplug_fp8.operators import rows_of
from mplug_fp8.products import Delayed
from mplug_fp8.prologue_operators import activated, activation_gradient, norm_gradient, normed, normed_again
from mplug_fp8.recipes import INPUT
from mplug_nn import DelayedScaling, FusedProduct, GatheredForm, Inputs, Narrow, Operand, Prologue, Sink, Upstream

Buffers = Mapping[str, Tensor]
Saved = tuple[Tensor, ...]
SCALE = DelayedScaling.scale_name(INPUT)
NORMS, ACTIVATIONS = ("layernorm", "rmsnorm"), ("gelu", "gelu_tanh", "swiglu")


@dataclass(frozen=True)
class Fused(FusedProduct):
    """What norms and activations share: the products of `Delayed`."""

    product: Delayed

    def cast(self, weight: Tensor, buffers: Buffers) -> Saved:
        """The copies of the weight that the products read."""
        return self.product.cast(weight, buffers)

    def gathered_form(self) -> GatheredForm | str:
        """That of the product."""
        return self.product.gathered_form()

    def wgrad(self, operands: Saved, sink: Sink | None, narrow: Narrow, buffers: Buffers) -> Tensor | None:
        """The weight's gradient, from columns of the gradient and of the input."""
        return self.product.wgrad(operands, sink, narrow, buffers)

    def differentiated(self, grad_y: Tensor, weight: Operand, narrow: Narrow, buffers: Buffers) -> tuple[Tensor, Saved]:
        """(the gradient of the prologue's result [N, I], the first operands of `wgrad`)."""
        grad, operands = self.product.dgrad(grad_y, weight, (), narrow, buffers, True)
        assert grad is not None
        return rows_of(grad), operands


def _operand(numbers: Tensor, shape: tuple[int, ...], narrow: Narrow) -> Tensor:
    """The input as `wgrad` takes it: its columns, or this rank's rows [..., n, I], which `wgrad` gathers."""
    return numbers if narrow.before is None else numbers.view(*shape[:-1], numbers.shape[1])


class NormProduct(Fused):
    """LayerNorm or RMSNorm, after the residual addition, and the product. Saves the residual stream."""

    def forward(
        self, given: tuple[Prologue, Inputs], weight: Operand, narrow: Narrow, buffers: Buffers
    ) -> tuple[tuple[Tensor, Tensor | None], Saved]:
        """(the product, the residual stream if there is a residual, it and its statistics and the norm's weights)."""
        prologue, inputs = given
        x, residual, norm_weight, bias = inputs
        assert norm_weight is not None
        rows, inverse, summed, *statistics = normed(
            rows_of(x),
            None if residual is None else rows_of(residual),
            norm_weight,
            bias,
            prologue.eps,
            prologue.kind == "layernorm",
            buffers[SCALE],
            buffers[INPUT],
        )
        stream = x if residual is None else summed.view(x.shape)
        y = self.product.of_numbers(rows.view(x.shape), inverse, weight, narrow, buffers)
        saved = (stream, inverse, *statistics, norm_weight, *([] if bias is None else [bias]))
        return (y, None if residual is None else stream), saved

    def dgrad(
        self,
        upstream: Upstream,
        weight: Operand,
        saved: Saved,
        narrow: Narrow,
        buffers: Buffers,
        needs_x: bool,
    ) -> tuple[tuple[Tensor, Tensor | None, Tensor | None], Saved]:
        """(the gradients of the sum, of the norm's weight and of its bias; the operands of `wgrad`)."""
        _, grad_y, grad_summed = upstream
        stream, inverse, *statistics, norm_weight = saved[:5]
        bias = saved[5] if len(saved) > 5 else None
        summed, shape = rows_of(stream), tuple(stream.shape)
        grad, operands = self.differentiated(grad_y, weight, narrow, buffers)
        scale, whole = buffers[SCALE], narrow.before is None
        numbers = normed_again(summed, *statistics, norm_weight, bias, scale, whole)
        assert grad_summed is not None
        grad_s, grads = norm_gradient(grad, rows_of(grad_summed), summed, *statistics, norm_weight, bias is not None)
        of_bias = None if bias is None else grads[1]
        return (grad_s.view(shape), grads[0], of_bias), (*operands, _operand(numbers, shape, narrow), inverse)


class ActivationProduct(Fused):
    """GELU or SwiGLU and the product. Saves what the activation reads."""

    def forward(
        self, given: tuple[Prologue, Inputs], weight: Operand, narrow: Narrow, buffers: Buffers
    ) -> tuple[tuple[Tensor, Tensor | None], Saved]:
        """(the product, None, what the activation reads and the inverse of the scale)."""
        prologue, inputs = given
        x, bias = inputs.x, inputs.bias
        rows, inverse = activated(rows_of(x), bias, prologue.kind, buffers[SCALE], buffers[INPUT])
        numbers = rows.view(*x.shape[:-1], rows.shape[1])
        y = self.product.of_numbers(numbers, inverse, weight, narrow, buffers)
        return (y, None), (x, inverse, *([] if bias is None else [bias]))

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
        x, inverse, *rest = saved
        bias, shape = rest[0] if rest else None, tuple(x.shape)
        grad, operands = self.differentiated(grad_y, weight, narrow, buffers)
        scale, whole = buffers[SCALE], narrow.before is None
        grad_x, of_bias, numbers = activation_gradient(grad, rows_of(x), bias, prologue.kind, scale, whole)
        grads = grad_x.view(shape), None, None if bias is None else of_bias
        return grads, (*operands, _operand(numbers, shape, narrow), inverse)
