"""What modules count in a step: summed over all ranks when the step ends, and told to the modules that learn by it."""

from collections.abc import Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from mplug.plan import Placement, Plan
from mplug.run import Run


class Statistics:
    """The statistics that a plan's buffers describe, of all ranks and stages: a rank has those of its own modules.

    What several ranks count alike is counted once: by the first of those along mesh axes that divide none of the
    activation axes that the statistic is taken over.
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
        """Forget the last step's."""
        if self.own:
            torch._foreach_zero_(list(self.own.values()))

    def finish(self, num_targets: Tensor) -> dict[str, Tensor]:
        """Make this rank's buffers those of the whole step; returns every stage's statistics, as they are told."""
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
        """Let modules learn from the step; where `skip` is 1, they must not."""
        for module in self.learners:
            module.step_ended(skip)
