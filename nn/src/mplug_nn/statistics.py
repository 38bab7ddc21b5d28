"""Statistics and auxiliary losses of modules and suppliers: sums and maxima over a step, in declared buffers.

The functions are operators that mutate a buffer, so that a compiled unit can contain them. A backward pass may run
parts of the forward pass again (recomputation). Therefore the functions for forward passes do nothing inside of
backward, and those for backward passes have names of their own.
"""

import torch
from torch import Tensor

from mplug.tensors.operator import fake, operator


@operator("mplug::count", mutates_args=("total",))
def count(total: Tensor, values: Tensor) -> None:
    """total [...] += values, except during a backward pass: a forward pass inside backward is a recomputation."""
    if torch._C._current_graph_task_id() == -1:
        total.add_(values)


@operator("mplug::keep_max", mutates_args=("largest",))
def keep_max(largest: Tensor, values: Tensor) -> None:
    """largest [...] = the maximum of itself and values, except during a backward pass (see `count`)."""
    if torch._C._current_graph_task_id() == -1:
        torch.maximum(largest, values.to(largest.dtype), out=largest)


@operator("mplug::count_in_backward", mutates_args=("total",))
def count_in_backward(total: Tensor, values: Tensor) -> None:
    """total [...] += values; call it in the backward of a `torch.autograd.Function`, or in a supplier's gradients."""
    total.add_(values)


@operator("mplug::keep_max_in_backward", mutates_args=("largest",))
def keep_max_in_backward(largest: Tensor, values: Tensor) -> None:
    """largest [...] = the maximum of itself and values; call it in backward, like `count_in_backward`."""
    torch.maximum(largest, values.to(largest.dtype), out=largest)


@operator("mplug::in_backward")
def in_backward(value: Tensor, upstream: Tensor) -> Tensor:
    """A copy of value [...], for a gradient that begins in the backward pass of a `torch.autograd.Function`.

    `upstream` is the gradient that backward receives; its values are not read. A compiler divides a unit's passes by
    what depends on the upstream gradient, and moves everything else of backward into the forward pass. There, additions
    to a sink would begin with the sink's values before backward, and overwrite what other units add in the meantime.
    So a backward that returns a gradient which does not depend on its upstream gradient returns it through this
    operator.
    """
    return value.clone()


@fake("mplug::in_backward")
def _(value: Tensor, upstream: Tensor) -> Tensor:
    return torch.empty_like(value)


class _Auxiliary(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, loss, scale):  # type: ignore[no-untyped-def]  # noqa: ARG004
        ctx.save_for_backward(scale)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        (scale,) = ctx.saved_tensors
        return grad, in_backward(scale, grad), None


def add_auxiliary(x: Tensor, loss: Tensor, scale: Tensor) -> Tensor:
    """Return x [...]; in backward, `loss` [] has the gradient that it would have as a term of the model's loss.

    `loss` must be a sum over tokens, like the model's loss; the host divides both by the global number of targets. The
    loss stays on the rank that computes it: its value does not travel to the last unit. `scale` [] is a buffer of the
    module that the host fills (`register_host_buffer`): for 'loss scale', or for 'token scale' if the loss is a mean
    over all tokens, with or without a target.
    """
    result: Tensor = _Auxiliary.apply(x, loss, scale.to(loss.dtype))  # type: ignore[no-untyped-call]
    return result
