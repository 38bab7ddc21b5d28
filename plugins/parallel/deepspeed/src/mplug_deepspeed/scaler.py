"""DeepSpeed's loss scale (fp16), in the form in which the host reports and saves loss scales."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from mplug import Run


class EngineScale:
    """The scale of DeepSpeed's scaler. DeepSpeed changes it in the engine's step; this object follows.

    `scale` [] is the scale of the current step, `good` [] the number of steps without an overflow since it last
    changed, `overflows` [] the number of steps that overflowed.
    """

    def __init__(self, run: "Run", scaler: Any) -> None:
        self.scaler, self.smallest = scaler, run.config.trainer.loss_scale.smallest
        scaler.raise_error_at_min_scale = False  # `trainer.nonfinite` decides
        self._used = float(scaler.cur_scale)
        self.scale, self.good, self.overflows = torch.zeros((3,), device=run.device).unbind()
        self._read()

    def begin_step(self) -> float:
        """The scale of the step that begins."""
        self._read()
        self._used = float(self.scaler.cur_scale)
        return self._used

    @property
    def left(self) -> float:
        """The factor that gradients still have in the update.

        DeepSpeed adapts the scale before it divides gradients by it. So in a step after which the scale rises, it
        divides by the new scale.
        """
        return self._used / float(self.scaler.cur_scale)

    def gradient_of(self, loss: Tensor) -> Tensor:
        """The gradient with which backward starts, in the loss's precision."""
        return self.scale.to(loss.dtype)

    def failed(self, overflow: Tensor) -> Tensor:
        """Whether gradients overflow although the scale is at its minimum."""
        return overflow & (self.scale <= self.smallest)

    def update(self, overflow: Tensor, halted: Tensor) -> None:
        """Follow DeepSpeed's scale after a step, and count overflows."""
        self.overflows.add_(overflow)
        self._read()

    def _read(self) -> None:
        scaler = self.scaler
        self.scale.fill_(scaler.cur_scale)
        self.good.fill_((scaler.cur_iter - scaler.last_overflow_iter - 1) % scaler.scale_window)

    def state_dict(self) -> dict[str, Any]:
        """The tensors `scale`, `good` and `overflows`."""
        return {"scale": self.scale, "good": self.good, "overflows": self.overflows}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with the values of `state`."""
        for name, own in self.state_dict().items():
            own.copy_(state[name])
        scaler = self.scaler
        scaler.cur_scale = float(self.scale)
        scaler.last_overflow_iter = scaler.cur_iter - 1 - int(self.good)
