"""The stepper around another one that keeps the micro batches of the last steps, to run their passes again."""

from collections.abc import Iterable, Iterator, Mapping
from operator import length_hint
from typing import cast

from torch import Tensor

from mplug.contracts.micro_batch import RankBatch
from mplug.contracts.stepper import ForwardStepper, Stepper, StepResult
from mplug.errors import UsageError
from mplug.model.model import Model
from mplug.run.run import Run

KEPT = 2
"""Steps whose micro batches are kept: on a GPU, the figures of a step are read when the next one is launched."""


def rerunning(run: Run, model: Model, stepper: Stepper) -> Stepper:
    """The stepper with `rerun`, if a plugin explains steps that are not finite; otherwise the stepper itself.

    Raises UsageError if passes could not be repeated.
    """
    explaining = run.hooks.implementers("explain_nonfinite")
    if not explaining:
        return stepper
    if run.config.trainer.graphs:
        raise UsageError(
            f"{explaining[0]} runs the passes of a step again with checks between the units, and trainer.graphs "
            f"replays a step as a whole; set trainer.graphs=false, or leave {explaining[0]} out"
        )
    if model.engine is not None:
        (engine,) = run.hooks.implementers("shard_states")
        raise UsageError(
            f"{explaining[0]} runs the passes of a step again, and {engine} keeps gradients that mplug cannot discard "
            f"(Sharding.engine); use a layout without {engine}, or leave {explaining[0]} out"
        )
    return RerunningStepper(stepper)


class RerunningStepper:
    """Keeps the micro batches that the inner stepper has taken in the last steps; it adds no work to a step."""

    def __init__(self, stepper: Stepper) -> None:
        self.stepper = stepper
        self._kept: dict[int, list[RankBatch]] = {}

    def forward_backward(self, micro_batches: Iterable[RankBatch], step: int) -> None:
        """Run the passes of a step, and keep its micro batches."""
        self._kept = {number: kept for number, kept in self._kept.items() if step - KEPT < number < step}
        self._kept[step] = []
        self.stepper.forward_backward(Keeping(micro_batches, self._kept[step]), step)

    def batches(self, step: int) -> list[RankBatch]:
        """The micro batches of one of the last steps."""
        return self._kept[step]

    def rerun(self, step: int) -> None:
        """Run the passes of one of the last steps again. Collective, as the step was."""
        self.stepper.forward_backward(self._kept[step], step)

    def update(self, lr: float, weight_decay: float) -> StepResult:
        """The update of the inner stepper."""
        return self.stepper.update(lr, weight_decay)

    def outputs(self, micro_batches: Iterable[RankBatch]) -> list[Mapping[str, Tensor]]:
        """The outputs, by the inner stepper."""
        return cast("ForwardStepper", self.stepper).outputs(micro_batches)

    def evaluate(self, micro_batches: Iterable[RankBatch]) -> Tensor:
        """The mean loss, by the inner stepper."""
        return self.stepper.evaluate(micro_batches)


class Keeping:
    """An iterator over micro batches that appends each one to `kept` when it is taken."""

    def __init__(self, batches: Iterable[RankBatch], kept: list[RankBatch]) -> None:
        self._batches, self._kept, self._count = iter(batches), kept, length_hint(batches)

    def __length_hint__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[RankBatch]:
        return self

    def __next__(self) -> RankBatch:
        self._kept.append(next(self._batches))
        return self._kept[-1]
