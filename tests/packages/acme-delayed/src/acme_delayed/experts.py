"""The products of experts on a grid. M rows, e groups, I in, O out, H steps, N sites.

Rows after those of the last group have arbitrary content, which no statistic may contain.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from mplug import Site, SlotBuffer
from mplug_nn import GroupedProduct, Operand, count, keep_max, keep_max_in_backward

Buffers = Mapping[str, Tensor]
INPUT, GRADIENT = range(2)
"""The operands' rows of the history [2, H]."""
TOKENS = ("batch", "sequence")
WEIGHTS = {"up": "up_", "down": "down_"}


class Groups(GroupedProduct):
    """Products whose rows and gradients are rounded; without a history nothing is rounded."""

    def __init__(self, bits: int, margin: float) -> None:
        self.largest, self.margin = 2 ** (bits - 1) - 1, margin

    def forward(
        self, rows: Tensor, weight: Operand, ends: Tensor, buffers: Buffers
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """rows [M, I] -> ([M, O], the rounded rows)."""
        own = _own(rows, ends)
        keep_max(buffers["input"], _largest(own))
        count(buffers["total"], own.abs().sum(dtype=buffers["total"].dtype))
        return super().forward(self._on_grid(own, buffers, INPUT), weight, ends, buffers)

    def dgrad(
        self,
        grad_y: Tensor,
        weight: Operand,
        saved: tuple[Tensor, ...],
        ends: Tensor,
        buffers: Buffers,
        needs_rows: bool,
    ) -> tuple[Tensor | None, tuple[Tensor, ...]]:
        """grad_y [M, O] -> (the gradient of the rows, the rounded operands of `wgrad`)."""
        own = _own(grad_y, ends)
        keep_max_in_backward(buffers["gradient"], _largest(own))
        return super().dgrad(self._on_grid(own, buffers, GRADIENT), weight, saved, ends, buffers, needs_rows)

    def _on_grid(self, x: Tensor, buffers: Buffers, operand: int) -> Tensor:
        span = self.margin * buffers["history"][operand].amax().to(x.dtype)
        step = torch.where(span > 0, span / self.largest, torch.ones_like(span))
        return torch.where(span > 0, (x / step).round().clamp(-self.largest, self.largest) * step, x)


def _own(rows: Tensor, ends: Tensor) -> Tensor:
    """The rows of groups; zeros after them."""
    inside = torch.arange(rows.shape[0], device=rows.device) < ends[-1]
    return torch.where(inside[:, None], rows, 0.0)


def _largest(x: Tensor) -> Tensor:
    """The largest absolute value; 0 without rows, whose number a compiler may not know."""
    return torch.cat((x.abs().flatten(), x.new_zeros(1))).amax()


def buffers(site: Site, history: int) -> dict[str, SlotBuffer]:
    """Those of both products: the largest values and the sum of a step, and what the next step reads of the last."""
    found = {}
    for weight, prefix in WEIGHTS.items():
        experts, outputs, inputs = (site.axes(weight, dim) for dim in range(3))
        over = {"input": (*TOKENS, *experts, *inputs), "gradient": (*TOKENS, *experts, *outputs)}
        found |= {f"{prefix}{name}": SlotBuffer(over=axes, reduction="max") for name, axes in over.items()}
        found[f"{prefix}total"] = SlotBuffer(over=over["input"])
        found |= {
            f"{prefix}last_total": SlotBuffer(),
            f"{prefix}history": SlotBuffer((2, history), ("operand", "step")),
        }
    return found


def step_ended(stacked: Buffers) -> dict[str, Tensor]:
    """The step's largest values enter the histories [N, 2, H], and the oldest ones leave them."""
    found = {}
    for prefix in WEIGHTS.values():
        newest = torch.stack([stacked[f"{prefix}{name}"] for name in ("input", "gradient")], dim=1)  # [N, 2]
        found[f"{prefix}history"] = torch.cat((newest[..., None], stacked[f"{prefix}history"][..., :-1]), dim=2)
        found[f"{prefix}last_total"] = stacked[f"{prefix}total"]
    return found
