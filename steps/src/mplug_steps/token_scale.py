"""The factor of losses inside of blocks that are means over tokens, such as a router's.

The host divides the gradients of a step once, by the number of targets of the global batch. The loss of a router is a
mean over tokens instead: all positions of the global batch, with or without a target, because a router sees all of them
and knows no target. So its gradient has the factor targets / tokens of the whole step. Backward of the first micro
batch needs this factor: a step with such losses reads its micro batches before it begins.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from mplug.contracts.micro_batch import RankBatch
from mplug.errors import UsageError
from mplug.run.run import Run
from mplug.tensors.host_buffers import fill_host_buffers, host_buffers
from mplug.training.steps import NoTokenScale


class TokenScale(NoTokenScale):
    """Counts the targets of a step in advance, and fills the buffers for 'token scale' with the factor.

    `is_missing` says that losses of this step need the factor, and that it is not known yet. `loss_scale` [] is the
    factor by which the model's loss is multiplied before backward, or None for 1. Building is collective: all ranks
    take part in the counts, also those of pipeline stages without such losses.
    """

    def __init__(self, run: Run, module: nn.Module, loss_scale: Tensor | None) -> None:
        super().__init__(loss_scale)
        self.run = run
        self._is_needed = any(run.gathered(bool(host_buffers(module, "token scale"))))
        self.is_missing = self._is_needed
        self.scale = torch.ones((), dtype=run.precision.master_dtype, device=run.device)
        fill_host_buffers(module, "token scale", self.scale)
        self.counts = torch.zeros(2, dtype=torch.float64, device=run.device)
        """[targets, tokens] of this rank's samples in the step; zeros if another rank counts the same samples."""

    def begin_step(self) -> None:
        """Forget the last step's factor."""
        self.is_missing = self._is_needed

    def read(self, micro_batches: Iterable[RankBatch]) -> Iterable[RankBatch]:
        """The step's micro batches; if a loss needs the factor, all of them are read here, and it is set. Collective.

        The CPU does not wait for the device.
        """
        if not self._is_needed:
            return micro_batches
        batches = list(micro_batches)
        self.count(batches)
        self.set()
        return batches

    def count(self, batches: list[RankBatch]) -> None:
        """Write the counts of a step's micro batches to the device, if a loss needs the factor."""
        if not self._is_needed:
            return
        targets = [batch.targets for batch in batches if batch.targets is not None]
        if len(targets) < len(batches):  # on every rank, or the others would wait for the counts
            raise UsageError(
                "a loss inside of the model's blocks is a mean over tokens, and the micro batches of the data plugin "
                "have no entry 'labels' whose targets could be counted; use another data plugin, or set the "
                "coefficients of the loss to 0"
            )
        if self.run.counts_samples:
            self.counts[0].fill_(sum(targets))
            self.counts[1].fill_(sum(batch.positions for batch in batches))

    def set(self) -> None:
        """Set the factor, if a loss needs it, from the counts of the ranks that train one model.

        Collective; a CUDA graph can replay it.
        """
        if self._is_needed:
            targets, tokens = self.run.summed_within_worker(self.counts).unbind()
            factor = (targets / tokens).to(self.scale.dtype)
            self.scale.copy_(factor if self.loss_scale is None else factor * self.loss_scale)
            self.is_missing = False
