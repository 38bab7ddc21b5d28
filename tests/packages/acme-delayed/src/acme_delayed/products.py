"""The three products on a grid, and the update of histories. B batch, S sequence, I in, O out, H steps, N sites."""

from collections.abc import Mapping

import torch
from torch import Tensor

from mplug_nn import Gemm, add_product, count, count_in_backward, keep_max, keep_max_in_backward

Buffers = Mapping[str, Tensor]
INPUT, WEIGHT, GRADIENT = range(3)
"""The operands' rows of the history [3, H]."""


def products(bits: int, margin: float) -> Gemm:
    """The products with operands of so many bits; an operand without a history is not rounded.

    The grid ends at `margin` times the largest value of the history; larger values become the end.
    """
    largest = 2 ** (bits - 1) - 1

    def on_grid(x: Tensor, buffers: Buffers, operand: int) -> Tensor:
        span = margin * buffers["history"][operand].amax().to(x.dtype)
        step = torch.where(span > 0, span / largest, torch.ones_like(span))
        return torch.where(span > 0, (x / step).round().clamp(-largest, largest) * step, x)

    def forward(x: Tensor, weight: Tensor, buffers: Buffers) -> Tensor:
        keep_max(buffers["input"], x.abs().amax())
        keep_max(buffers["weight"], weight.abs().amax())
        count(buffers["total"], x.abs().sum(dtype=buffers["total"].dtype))
        return on_grid(x, buffers, INPUT) @ on_grid(weight, buffers, WEIGHT).t()

    def dgrad(grad_y: Tensor, weight: Tensor, buffers: Buffers) -> Tensor:
        keep_max_in_backward(buffers["gradient"], grad_y.abs().amax())  # the weight may be frozen, without a wgrad
        return on_grid(grad_y, buffers, GRADIENT) @ on_grid(weight, buffers, WEIGHT)

    def wgrad(grad_y: Tensor, x: Tensor, main_grad: Tensor | None, buffers: Buffers) -> Tensor | None:
        rows = grad_y.flatten(0, -2)
        keep_max_in_backward(buffers["gradient"], rows.abs().amax())
        count_in_backward(buffers["row_totals"], rows.abs().sum(dim=0, dtype=buffers["row_totals"].dtype))
        left, right = on_grid(rows, buffers, GRADIENT).t(), on_grid(x, buffers, INPUT).flatten(0, -2)
        if main_grad is None:
            return left @ right
        add_product(main_grad, torch.zeros((), dtype=torch.bool, device="cpu"), left, right)
        return None

    return Gemm(forward, dgrad, wgrad)


def step_ended(stacked: Buffers) -> dict[str, Tensor]:
    """The step's largest values enter the histories [N, 3, H], and the oldest ones leave them."""
    newest = torch.stack([stacked[name] for name in ("input", "weight", "gradient")], dim=1)  # [N, 3]
    history = torch.cat((newest[..., None], stacked["history"][..., :-1]), dim=2)
    return {"history": history, "last_total": stacked["total"], "last_row_totals": stacked["row_totals"]}
