"""The products of adapters that no supplier and no collective takes part in: additions without passes of their own.

N rows, I inputs, O outputs, a rank r, n pairs of A and B. A product B_i h adds to the output of the linear layer, and a
product with A adds to the gradient of its input, each in one operation of the matrix product (beta = 1). Autograd alone
would write every product to memory, concatenate the pairs, and read the results again to add them.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from mplug_nn import Linear, Weights, fake, operator, weight_gradient


def down(x: Tensor, a: Linear, scale: float) -> tuple[Tensor, Tensor]:
    """x [..., I] -> (x, scale A x [..., n r]). The linear layer must read the first result in place of x.

    So its gradient reaches this function, which adds the adapter's gradient of x to it.
    """
    pair: tuple[Tensor, Tensor] = _Down.apply(scale, x, *_arguments(a))  # type: ignore[no-untyped-call]
    return pair


def up(y: Tensor, hidden: Tensor, linears: list[Linear], starts: list[int]) -> Tensor:
    """y [..., O], hidden [..., n r] -> y plus B_i hidden_i, in the columns from `starts[i]` on."""
    flat = [one for linear in linears for one in _arguments(linear)]
    added: Tensor = _Up.apply(starts, y, hidden, *flat)  # type: ignore[no-untyped-call]
    return added


def _arguments(linear: Linear) -> tuple[Tensor, Tensor | None, Tensor | None]:
    return tuple(Weights.of(linear.weight))  # type: ignore[return-value]


class _Down(torch.autograd.Function):
    """h = s x Aᵀ; grad_x = (the linear layer's gradient of x) + s grad_h A; grad_A = s grad_hᵀ x, to its sink."""

    @staticmethod
    def forward(ctx, scale, x, weight, main_grad, stale):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x, weight)
        ctx.scale, ctx.sink = scale, (main_grad, stale)
        return x, (x @ weight.t()) * scale

    @staticmethod
    def backward(ctx, grad_x, grad_hidden):  # type: ignore[no-untyped-def]
        x, weight = ctx.saved_tensors
        grad_hidden = grad_hidden * ctx.scale
        grad_x = grad_x.clone(memory_format=torch.contiguous_format)  # a compiler removes the copy
        add_products(grad_x, grad_hidden, [weight.t()], [0])
        grad_weight = weight_gradient(grad_hidden, x, Weights(weight, *ctx.sink)) if ctx.needs_input_grad[2] else None
        return None, grad_x, grad_weight, None, None


class _Up(torch.autograd.Function):
    """y + h_i B_iᵀ by pairs; grad_y as it comes; grad_h_i = grad_y_i B_i; grad_B_i = grad_y_iᵀ h_i, to its sink."""

    @staticmethod
    def forward(ctx, starts, y, hidden, *flat):  # type: ignore[no-untyped-def]
        weights = flat[::3]
        ctx.save_for_backward(hidden, *weights)
        ctx.starts, ctx.sinks = starts, tuple(zip(flat[1::3], flat[2::3], strict=True))
        y = y.clone(memory_format=torch.contiguous_format)  # a compiler removes the copy, unless something else reads y
        add_products(y, hidden, list(weights), starts)
        return y

    @staticmethod
    def backward(ctx, grad_y):  # type: ignore[no-untyped-def]
        hidden, *weights = ctx.saved_tensors
        grad_hidden = products(grad_y, list(weights), ctx.starts)
        gradients: list[Tensor | None] = []
        parts = hidden.split(weights[0].shape[1], dim=-1)
        for number, (weight, part, start) in enumerate(zip(weights, parts, ctx.starts, strict=True)):
            gradient = None
            if ctx.needs_input_grad[3 + 3 * number]:
                own = grad_y[..., start : start + len(weight)]
                gradient = weight_gradient(own, part, Weights(weight, *ctx.sinks[number]))
            gradients += [gradient, None, None]
        return None, grad_y, grad_hidden, *gradients


@operator("mplug_lora::add_products", mutates_args=("y",))
def add_products(y: Tensor, hidden: Tensor, ups: list[Tensor], starts: list[int]) -> None:
    """y [..., O] += hidden_i ups_iᵀ, in the columns of y from `starts[i]` on; hidden [..., n r], ups_i [O_i, r]."""
    rows, columns = hidden.reshape(-1, hidden.shape[-1]), y.view(-1, y.shape[-1])
    for part, weight, start in zip(rows.split(ups[0].shape[1], dim=1), ups, starts, strict=True):
        columns[:, start : start + len(weight)].addmm_(part, weight.t())


@operator("mplug_lora::products")
def products(y: Tensor, ups: list[Tensor], starts: list[int]) -> Tensor:
    """y [..., O] -> y_i ups_i [..., n r], where y_i are the columns of y from `starts[i]` on; ups_i [O_i, r]."""
    rows, rank = y.reshape(-1, y.shape[-1]), ups[0].shape[1]
    hidden = y.new_empty(len(rows), rank * len(ups))
    for part, weight, start in zip(hidden.split(rank, dim=1), ups, starts, strict=True):
        torch.mm(rows[:, start : start + len(weight)], weight, out=part)
    return hidden.view(*y.shape[:-1], -1)


@fake("mplug_lora::products")
def _(y: Tensor, ups: list[Tensor], starts: list[int]) -> Tensor:
    return y.new_empty(*y.shape[:-1], ups[0].shape[1] * len(ups))


@register_flop_formula([torch.ops.mplug_lora.add_products, torch.ops.mplug_lora.products])
def _flops(y: tuple[int, ...], *arguments: Any, **_: Any) -> int:
    """Two FLOPs per multiply-add of every row."""
    ups = next(one for one in arguments if isinstance(one[0], tuple | list | torch.Size))
    rows = 1
    for length in y[:-1]:
        rows *= length
    return sum(2 * rows * weight[0] * weight[1] for weight in ups)
