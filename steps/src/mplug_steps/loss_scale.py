"""Dynamic loss scaling (arXiv 1710.03740, section 3.2), for precisions such as fp16, whose range is 6e-8 to 65504.

Backward starts with the scale instead of 1, so that small gradients do not become zero. If scaled gradients overflow,
the step is skipped and the scale falls; after many steps without an overflow it rises. All of it stays on the device.
"""

from typing import Any

import torch
from torch import Tensor, nn

from mplug.run.run import Run
from mplug.tensors.host_buffers import fill_host_buffers


class LossScale:
    """The loss scale of a run. It is equal on every rank, because it follows from the norm over all ranks.

    `scale` [], `good` [] and `overflows` [] are fp32. `good` counts the steps without an overflow since the scale last
    changed; `overflows` counts the steps that overflowed so far.
    """

    def __init__(self, run: Run, module: nn.Module) -> None:
        self.config, device = run.config.trainer.loss_scale, run.device
        self.scale = torch.full((), self.config.initial, device=device)
        self.good, self.overflows = torch.zeros((2,), device=device).unbind()
        fill_host_buffers(module, "loss scale", self.scale)

    def gradient_of(self, loss: Tensor) -> Tensor:
        """The gradient with which backward starts: the scale, in the loss's precision."""
        return self.scale.to(loss.dtype)

    def failed(self, overflow: Tensor) -> Tensor:
        """Whether gradients overflow although the scale is at its minimum."""
        return overflow & (self.scale <= self.config.smallest)

    @torch.no_grad()
    def update(self, overflow: Tensor, halted: Tensor) -> None:
        """Adapt the scale after a step. `overflow` [] and `halted` [] are booleans; `halted` freezes all values."""
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
        """The tensors `scale`, `good` and `overflows`."""
        return {"scale": self.scale, "good": self.good, "overflows": self.overflows}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Copy the values of `state` into the live tensors."""
        for name, own in self.state_dict().items():
            own.copy_(state[name])
