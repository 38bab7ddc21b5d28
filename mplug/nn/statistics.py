"""What modules count while they run: sums over a step, kept in buffers that the plan describes."""

import torch
from torch import Tensor

from mplug.nn.operator import operator


@operator("mplug::count", mutates_args=("total",))
def count(total: Tensor, values: Tensor) -> None:
    """total [...] += values, unless a backward pass is under way: a forward pass inside of one is a recomputation."""
    if torch._C._current_graph_task_id() == -1:
        total.add_(values)


class _Auxiliary(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, loss, scale):  # type: ignore[no-untyped-def]  # noqa: ARG004
        ctx.save_for_backward(scale)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        (scale,) = ctx.saved_tensors
        return grad, scale.clone(), None


def add_auxiliary(x: Tensor, loss: Tensor, scale: Tensor) -> Tensor:
    """x [...], through which `loss` [] takes part in the backward pass as if it were added to the model's loss.

    Like that it is a sum over tokens, which one global count divides in the end. It stays where it is: nothing of it
    travels to the last unit. `scale` [] is what the model's loss is multiplied with before its backward pass: a buffer
    of the module named `loss_scale`, which the host fills.
    """
    result: Tensor = _Auxiliary.apply(x, loss, scale.to(loss.dtype))  # type: ignore[no-untyped-call]
    return result
