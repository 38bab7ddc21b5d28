"""Delayed scaling of a linear layer's operands (arXiv 2209.05433): what a site keeps, and the scales of the next step.

H steps of history, N sites. A supplier of products quantises an operand with the scale that the last steps gave, and
keeps the operand's largest absolute value. So it reads the operand once.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from mplug.model.offers import Site
from mplug.model.slot_buffer import SlotBuffer

TOKENS = ("batch", "sequence")
LARGEST_SCALE = 2.0**126
"""Its inverse is the smallest normal number of fp32."""


@dataclass(frozen=True)
class DelayedScaling:
    """The buffers of `Linear.product` or `Linear.gemm` for operands with delayed scales, and their update.

    `limits` has the operands, by the names of `OPERANDS`, and the largest number of each one's format. A scale maps the
    largest absolute value in `steps` steps to this number divided by 2 to the power of `margin`; `power_of_two` rounds
    it down. An offer passes on `buffers` and `step_ended`:

        delayed = DelayedScaling({"input": 448.0, "gradient": 57344.0}, steps=1024)
        Offer(product, supports, buffers=delayed.buffers, step_ended=delayed.step_ended)

    The product receives, for each operand: the buffer of its name [], to which it applies `keep_max` (in backward:
    `keep_max_in_backward`), and the scale [1], whose name is `scale_name(operand)`.
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
        outputs, inputs = site.axes("weight", 0), site.axes("weight", 1)
        over = {"input": (*TOKENS, *inputs), "gradient": (*TOKENS, *outputs), "weight": (*outputs, *inputs)}
        found: dict[str, SlotBuffer] = {}
        for operand, limit in self.limits.items():
            found[operand] = SlotBuffer(over=over[operand], reduction="max")
            found[self.history_name(operand)] = SlotBuffer((self.steps,), ("step",))
            found[self.scale_name(operand)] = SlotBuffer((1,), ("scale",), value=limit / self.FIRST[operand])
        return found

    def step_ended(self, stacked: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The step's largest values enter the histories [N, H], and the oldest ones leave them; the scales follow.

        A scale stays if its history has no positive number, or one that is not finite.
        """
        found = {}
        for operand, limit in self.limits.items():
            history = torch.cat((stacked[operand][:, None], stacked[self.history_name(operand)][:, :-1]), dim=1)
            largest, last = history.amax(dim=1, keepdim=True), stacked[self.scale_name(operand)]
            sound = (largest > 0) & largest.isfinite()
            scale = self._scales(torch.where(sound, largest, 1.0).float(), limit)
            found[self.history_name(operand)] = history
            found[self.scale_name(operand)] = torch.where(sound, scale.to(last.dtype), last)
        return found

    def _scales(self, largest: Tensor, limit: float) -> Tensor:
        scale = (torch.full_like(largest, limit) / largest).clamp(max=LARGEST_SCALE)
        if self.power_of_two:
            scale = (scale.view(torch.int32) & -0x800000).view(torch.float32)
        return scale.div(2**self.margin)
