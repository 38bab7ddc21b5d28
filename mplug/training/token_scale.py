"""The factor of losses inside of blocks that are means over tokens, such as a router's.

The host divides the gradients of a step once, by the number of targets of the global batch. The loss of a router is a
mean over tokens instead: all positions of the global batch, with or without a target, because a router sees all of them
and knows no target. So its gradient has the factor targets / tokens of the whole step. Backward of the first micro
batch needs this factor: a step with such losses reads its micro batches before it begins.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from mplug.contracts import IGNORED, MicroBatch
from mplug.errors import UsageError
from mplug.run.run import Run
from mplug.tensors.host_buffers import fill_host_buffers, host_buffers


class TokenScale:
    """Counts the targets of a step in advance, and fills the buffers for 'token scale' with the factor.

    `is_missing` says that losses of this step need the factor, and that it is not known yet. `loss_scale` [] is the
    factor by which the model's loss is multiplied before backward, or None for 1. Building is collective: all ranks
    take part in the counts, also those of pipeline stages without such losses.
    """

    def __init__(self, run: Run, module: nn.Module, loss_scale: Tensor | None) -> None:
        self.run, self.loss_scale = run, loss_scale
        self._is_needed = any(run.gathered(bool(host_buffers(module, "token scale"))))
        self.is_missing = self._is_needed
        self.scale = torch.ones((), dtype=run.precision.master_dtype, device=run.device)
        fill_host_buffers(module, "token scale", self.scale)

    def begin_step(self) -> None:
        """Forget the last step's factor."""
        self.is_missing = self._is_needed

    def read(self, micro_batches: Iterable[MicroBatch]) -> Iterable[MicroBatch]:
        """The step's micro batches; if a loss needs the factor, all of them are read here, and it is set. Collective.

        The CPU does not wait for the device.
        """
        if not self._is_needed:
            return micro_batches
        batches = list(micro_batches)
        targets, tokens = self.run.summed(self._counts(batches)).unbind()
        factor = (targets / tokens).to(self.scale.dtype)
        self.scale.copy_(factor if self.loss_scale is None else factor * self.loss_scale)
        self.is_missing = False
        return batches

    def _counts(self, batches: list[MicroBatch]) -> Tensor:
        """[targets, tokens] of this rank's samples; zeros if another rank counts the same samples."""
        counts = torch.zeros(2, dtype=torch.float64, device=self.run.device)
        if any("labels" not in batch for batch in batches):  # on every rank, or the others would wait for the counts
            raise UsageError(
                "a loss inside of the model's blocks is a mean over tokens, and the micro batches of the data plugin "
                "have no entry 'labels' whose targets could be counted; use another data plugin, or set the "
                "coefficients of the loss to 0"
            )
        for batch in batches if self.run.counts_samples else ():
            counts[0] += (batch["labels"] != IGNORED).sum()
            counts[1] += batch["labels"].numel()
        return counts
