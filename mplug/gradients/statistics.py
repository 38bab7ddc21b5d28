"""Step statistics: values that modules count in a step (such as expert load), and the host sums when the step ends."""

from collections.abc import Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from mplug.layout.placement import Placement
from mplug.layout.plan import Plan
from mplug.run.run import Run


class Statistics:
    """The statistics that the buffers of a plan describe, for all stages; a rank has the buffers of its own modules.

    If several ranks count the same values, the sum includes one of them: the rank with index 0 along every mesh axis
    that divides none of the activation axes `over` of the statistic (the pipeline's axis excepted).
    """

    def __init__(self, run: Run, module: nn.Module, plan: Plan, placements: Mapping[str, Placement]) -> None:
        self.run = run
        described = plan.match_buffers(placements)
        self.described = {name: one for name, one in described.items() if one.is_statistic}
        self.shapes = {name: placements[name].shape for name in self.described}
        self.own = {name: buffer for name, buffer in module.named_buffers() if name in self.described}
        self.counted = {name for name in self.own if self._counts(name)}
        self.learners: list[Any] = [part for part in module.modules() if hasattr(part, "step_ended")]

    def _counts(self, name: str) -> bool:
        own, over = self.run.mesh.coordinates(self.run.rank), self.described[name].over
        return all(
            own[axis.name] == 0
            for axis in self.run.mesh.views["attention"]
            if "units" not in axis.activations and not any(axis.divides(named) for named in over)
        )

    def begin_step(self) -> None:
        """Set this rank's statistics to zero."""
        if self.own:
            torch._foreach_zero_(list(self.own.values()))

    def finish(self, num_targets: Tensor) -> dict[str, Tensor]:
        """Replace this rank's buffers by the sums over all ranks; returns the statistics of all stages, as reported."""
        if not self.described:
            return {}
        device = self.run.device
        parts = [
            self.own[name].flatten().double()
            if name in self.counted
            else torch.zeros(prod(shape), dtype=torch.float64, device=device)
            for name, shape in self.shapes.items()
        ]
        totals = self.run.summed(torch.cat(parts)).split([len(part) for part in parts])
        found = {name: total.view(shape) for (name, shape), total in zip(self.shapes.items(), totals, strict=True)}
        if self.own:
            torch._foreach_copy_(list(self.own.values()), [found[name] for name in self.own])
        return {
            name: total / num_targets if self.described[name].per_target else total for name, total in found.items()
        }

    def tell(self, skip: Tensor) -> None:
        """Call `step_ended` of each module that has it; with `skip` = 1, a module must not learn from the step."""
        for module in self.learners:
            module.step_ended(skip)
