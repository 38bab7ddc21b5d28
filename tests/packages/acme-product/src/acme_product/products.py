"""The product in three parts. n rows of this rank, R ranks, I in, O out, N sites."""

from collections.abc import Mapping

import torch
from torch import Tensor

from mplug_nn import GatheredForm, Narrow, Operand, Product, Sink, add_product, keep_max

Buffers = Mapping[str, Tensor]
SPAN = 0.25
"""The largest number of a weight's grid; larger ones are left as they are."""


class Rounding(Product):
    """y = round(x) round(W)ᵀ. Backward uses the rounded operands too."""

    def __init__(self, levels: int) -> None:
        self.levels = levels

    def cast(self, weight: Tensor, buffers: Buffers) -> tuple[Tensor, ...]:
        """The rounded weight, transposed: [I, O]."""
        rounded = (weight / SPAN * self.levels).round() * SPAN / self.levels
        return (rounded.t().contiguous(),)

    def gathered_form(self) -> GatheredForm:
        """Numbers of levels in fp16, which is exact up to 2048: for weights up to 8, with 64 levels."""
        return GatheredForm(lambda rows, *_: ((rows / SPAN * self.levels).round().half(),), along_rows=(True,))

    def matrix(self, weight: Operand) -> Tensor:
        """The rounded weight, transposed: [I, O]."""
        (copy,) = weight.casts
        if copy.dtype is not torch.float16:
            return copy
        return (copy.to(weight.values.dtype) * SPAN / self.levels).t().contiguous()

    def forward(
        self, x: Tensor, weight: Operand, narrow: Narrow, buffers: Buffers
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Keeps the rounded input of this rank, not the gathered one."""
        keep_max(buffers["largest"], x.abs().amax())
        span = buffers["span"].to(x.dtype)
        step = torch.where(span > 0, span / self.levels, torch.ones_like(span))
        x = torch.where(span > 0, (x / step).round() * step, x)
        return narrow.scattered(narrow.gathered(x) @ self.matrix(weight)), (x,)

    def dgrad(
        self,
        grad_y: Tensor,
        weight: Operand,
        saved: tuple[Tensor, ...],
        narrow: Narrow,
        buffers: Buffers,
        needs_x: bool,
    ) -> tuple[Tensor | None, tuple[Tensor, ...]]:
        """The gradient passes the rounding unchanged."""
        grad_y = narrow.gathered_gradient(grad_y)
        grad_x = narrow.scattered_gradient(grad_y @ self.matrix(weight).t()) if needs_x else None
        return grad_x, (grad_y.flatten(0, -2).t().contiguous(), *saved)

    def wgrad(self, operands: tuple[Tensor, ...], sink: Sink | None, narrow: Narrow, buffers: Buffers) -> Tensor | None:
        """From the transposed gradient [O, R n] and the rounded input."""
        transposed, x = operands
        rows = narrow.gathered(x).flatten(0, -2)
        if sink is None:
            return transposed @ rows
        add_product(*sink, transposed, rows)
        return None


def step_ended(stacked: Buffers) -> dict[str, Tensor]:
    """The step's largest inputs become the spans of the next step."""
    return {"span": stacked["largest"]}
