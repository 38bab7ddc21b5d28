"""The values that the CPU decides for an update, as tensors on the device: an update reads no number that changes."""

from dataclasses import dataclass

import torch
from torch import Tensor

from mplug.contracts import StepScalars


@dataclass(frozen=True)
class StepValues:
    """Learning rate and weight decay in fp32, where the optimizer updates, and the request to stop.

    `stop` [] is greater than 0 if this rank has been asked to stop.
    """

    lr: Tensor
    weight_decay: Tensor
    stop: Tensor

    @classmethod
    def of(cls, lr: float, weight_decay: float, stop: Tensor, updated_on: torch.device) -> "StepValues":
        """The values in new tensors. Fills, unlike copies from the CPU's memory, never make the CPU wait."""
        rates = (torch.full((), value, dtype=torch.float32, device=updated_on) for value in (lr, weight_decay))
        return cls(next(rates), next(rates), stop)

    def fill(self, lr: float, weight_decay: float, stop: bool) -> None:
        """Write the values of another step into the same tensors."""
        self.lr.fill_(lr)
        self.weight_decay.fill_(weight_decay)
        self.stop.fill_(float(stop))

    def scalars(self, scale: Tensor, skip: Tensor) -> StepScalars:
        """What the optimizer receives; `scale` [] and `skip` [] are results of the step itself."""
        return StepScalars(self.lr, scale.to(self.lr), skip.to(self.lr.device), self.weight_decay)
