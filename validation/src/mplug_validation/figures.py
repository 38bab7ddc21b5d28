"""The figures of an objective in an evaluation of a run that does not train: accuracy, margin and the like."""

import torch

from mplug.model.model import Model
from mplug.run.run import Run
from mplug.training.steps import statistics_of


class Figures:
    """The sums that the objective at the end of a model adds to during an evaluation. All methods are collective.

    An objective does so in a run that does not train (`mplug_nn.replace_end`).
    """

    def __init__(self, run: Run, model: Model) -> None:
        self._run, self._statistics = run, statistics_of(run, model)
        unit = next(unit for unit in model.plan.units if "loss" in unit.outputs)
        own = {
            name: str(one.reported)
            for name, one in model.plan.match_buffers(model.buffer_placements).items()
            if name.startswith(f"{unit.name}.loss.") and one.per_target and one.reported
        }
        self._names = {name: reported for found in run.gathered(own) for name, reported in found.items()}

    def begin(self) -> None:
        """Set the sums to zero, before an evaluation."""
        self._statistics.begin_step()

    def means(self, num_targets: int) -> dict[str, float]:
        """After the evaluation: the sums of all ranks over the number of targets, by the names of the figures."""
        targets = torch.tensor(float(num_targets), dtype=torch.float64, device=self._run.device)
        self._statistics.finish(targets, targets)
        totals = self._statistics.totals
        return {name: float(totals[buffer] / targets) for buffer, name in self._names.items() if buffer in totals}
