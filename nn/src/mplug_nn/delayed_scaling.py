"""Delayed scaling of the operands of products (arXiv 2209.05433): what a site keeps, and the scales of the next step.

H steps of history, N sites. A supplier of products quantises an operand with the scale that the last steps gave, and
keeps the operand's largest absolute value. So it reads the operand once.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from mplug import Site, SlotBuffer

TOKENS = ("batch", "sequence")
LARGEST_SCALE = 2.0**126
"""Its inverse is the smallest normal number of fp32."""


@dataclass(frozen=True)
class DelayedScaling:
    """The buffers of the slots of linear layers and of `Experts.product`, for operands with delayed scales.

    `limits` has the operands, by the names of `OPERANDS`, and the largest number of each one's format. A scale maps the
    largest absolute value in `steps` steps to this number divided by 2 to the power of `margin`; `power_of_two` rounds
    it down. An offer passes on `buffers` and `step_ended`:

        delayed = DelayedScaling({"input": 448.0, "gradient": 57344.0}, steps=1024)
        Offer(product, supports, buffers=delayed.buffers, step_ended=delayed.step_ended)

    The product receives, for each operand: the buffer of its name [], to which it applies `keep_max` (in backward:
    `keep_max_in_backward`), and the scale [1], whose name is `scale_name(operand)`. The rows of all experts are one
    operand, and so are the matrices of all experts.
    """

    limits: Mapping[str, float]
    steps: int
    margin: int = 0
    power_of_two: bool = False

    OPERANDS = ("input", "gradient", "weight")
    FIRST = {"input": 28.0, "gradient": 224.0, "weight": 0.5}  # noqa: RUF012 (a constant)
    """The largest absolute values that scales of the first step keep, since there is no history yet."""

    def __post_init__(self) -> None:
        if unknown := set(self.limits).difference(self.OPERANDS):
            raise ValueError(f"'{min(unknown)}' is not an operand; `limits` names {', '.join(self.OPERANDS)}")

    @staticmethod
    def scale_name(operand: str) -> str:
        """The name of the buffer with the scale of an operand."""
        return f"{operand}_scale"

    @staticmethod
    def history_name(operand: str) -> str:
        """The name of the buffer with the largest absolute values of an operand in the last steps."""
        return f"{operand}_history"

    def buffers(self, site: Site) -> dict[str, SlotBuffer]:
        """For each operand: the largest value of the step [], those of the last steps [H], and the scale [1]."""
        if site.slot != "Experts.product":
            return self._of_weight(site, "weight", "", 0)
        return self._of_weight(site, "up", "up_", 1) | self._of_weight(site, "down", "down_", 1)

    def _of_weight(self, site: Site, weight: str, prefix: str, first: int) -> dict[str, SlotBuffer]:
        """Those of the product with a weight, whose outputs are its dimension `first`; dimensions before are groups."""
        groups = [axis for dim in range(first) for axis in site.axes(weight, dim)]
        outputs, inputs = (*groups, *site.axes(weight, first)), (*groups, *site.axes(weight, first + 1))
        over = {"input": (*TOKENS, *inputs), "gradient": (*TOKENS, *outputs), "weight": (*outputs, *inputs)}
        found: dict[str, SlotBuffer] = {}
        for operand, limit in self.limits.items():
            own = prefix + operand
            found[own] = SlotBuffer(over=tuple(dict.fromkeys(over[operand])), reduction="max")
            found[self.history_name(own)] = SlotBuffer((self.steps,), ("step",))
            found[self.scale_name(own)] = SlotBuffer((1,), ("scale",), value=limit / self.FIRST[operand])
        return found

    def step_ended(self, stacked: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The step's largest values enter the histories [N, H], and the oldest ones leave them; the scales follow.

        A scale stays if its history has no positive number, or one that is not finite.
        """
        found = {}
        for prefix, (operand, limit) in product(("", "up_", "down_"), self.limits.items()):
            own = prefix + operand
            if own not in stacked:
                continue
            history = torch.cat((stacked[own][:, None], stacked[self.history_name(own)][:, :-1]), dim=1)
            largest, last = history.amax(dim=1, keepdim=True), stacked[self.scale_name(own)]
            sound = (largest > 0) & largest.isfinite()
            scale = self._scales(torch.where(sound, largest, 1.0).float(), limit)
            found[self.history_name(own)] = history
            found[self.scale_name(own)] = torch.where(sound, scale.to(last.dtype), last)
        return found

    def _scales(self, largest: Tensor, limit: float) -> Tensor:
        scale = (torch.full_like(largest, limit) / largest).clamp(max=LARGEST_SCALE)
        if self.power_of_two:
            scale = (scale.view(torch.int32) & -0x800000).view(torch.float32)
        return scale.div(2**self.margin)
