"""Dynamic loss scaling for fp16 (arXiv 1710.03740, section 3.2), whose numbers end at 6e-8 and 65504.

Backward begins with the scale instead of 1, so that small gradients are no zeros. Where the scaled ones overflow, the
step is left out and the scale falls; after many steps without that it rises. All of it stays on the device.
"""

from typing import Any

import torch
from torch import Tensor, nn

from mplug.run import Run

BUFFER = "loss_scale"
"""The name of a module's buffer that holds the scale, for losses that join backward inside of blocks."""


class LossScale:
    """The scale of a run, the same on every rank: it follows from the norm over all of them.

    `scale` [] is fp32, and so is `good` [], the steps without an overflow since it last changed; `overflows` [] is how
    many steps have been left out so far.
    """

    def __init__(self, run: Run, module: nn.Module) -> None:
        self.config, device = run.config.trainer.loss_scale, run.device
        self.scale = torch.full((), self.config.initial, device=device)
        self.good, self.overflows = torch.zeros((2,), device=device).unbind()
        for part in module.modules():
            if BUFFER in part._buffers:
                part._buffers[BUFFER] = self.scale  # the one tensor, so that nothing has to be copied into it

    @classmethod
    def of(cls, run: Run, module: nn.Module) -> "LossScale | None":
        """The loss scale of a run in fp16; None in every other precision, whose exponents are fp32's."""
        return cls(run, module) if run.config.trainer.precision == "fp16" else None

    def gradient_of(self, loss: Tensor) -> Tensor:
        """What backward begins with: the scale, in the loss's precision."""
        return self.scale.to(loss.dtype)

    def failed(self, overflow: Tensor) -> Tensor:
        """Whether gradients overflow though the scale cannot fall any more."""
        return overflow & (self.scale <= self.config.smallest)

    @torch.no_grad()
    def update(self, overflow: Tensor, halted: Tensor) -> None:
        """Learn from a step. `overflow` [] and `halted` [] are booleans; nothing changes once the run is halted."""
        config = self.config
        good = torch.where(overflow, 0.0, self.good + 1)
        rises = good >= config.growth_interval
        scale = torch.where(overflow, (self.scale * config.backoff_factor).clamp(min=config.smallest), self.scale)
        scale = torch.where(rises, scale * config.growth_factor, scale)
        scale = torch.where(scale.isfinite(), scale, self.scale)
        for own, value in (
            (self.scale, scale),
            (self.good, torch.where(rises, 0.0, good)),
            (self.overflows, self.overflows + overflow),
        ):
            own.copy_(torch.where(halted, own, value))

    def state_dict(self) -> dict[str, Any]:
        """All of it."""
        return {"scale": self.scale, "good": self.good, "overflows": self.overflows}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue exactly where it was taken."""
        for name, own in self.state_dict().items():
            own.copy_(state[name])
