"""The stepper around another one that runs the passes of a step again if a plugin says that they were not exact."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import cast

from torch import Tensor

from mplug.contracts.micro_batch import RankBatch
from mplug.contracts.stepper import ForwardStepper, Stepper, StepResult
from mplug.errors import UsageError
from mplug.model.model import Model
from mplug.run.run import Run

Check = Callable[[], bool]


def repeating(run: Run, model: Model, stepper: Stepper) -> Stepper:
    """The stepper with the checks of the hook `build_step_check`; the stepper itself if no plugin has one.

    Raises UsageError if the gradients could not be discarded.
    """
    checks = run.hooks.each("build_step_check", run=run, model=model)
    if not checks:
        return stepper
    if model.engine is not None:
        (engine,) = run.hooks.implementers("shard_states")
        raise UsageError(
            f"{checks[0][0]} may compute the passes of a step again, and {engine} keeps gradients that mplug cannot "
            f"discard (Sharding.engine); use a layout without {engine}, or an exact option of {checks[0][0]}"
        )
    return RepeatingStepper(model, stepper, [check for _, check in checks])


class RepeatingStepper:
    """Keeps the micro batches of a step until all checks have accepted its passes; `num_repeated` steps were not exact.

    The CPU waits for the device once per step, in the checks.
    """

    def __init__(self, model: Model, stepper: Stepper, checks: list[Check]) -> None:
        self.model, self.stepper, self.checks, self.num_repeated = model, stepper, checks, 0

    def forward_backward(self, micro_batches: Iterable[RankBatch], step: int) -> None:
        """Run the passes of a step, and again if one of them was not exact."""
        kept = list(micro_batches)
        self.stepper.forward_backward(kept, step)
        if self._were_exact():
            return
        self.num_repeated += 1
        self.model.is_repeating = True
        try:
            self.stepper.forward_backward(kept, step)
        finally:
            self.model.is_repeating = False
        if not self._were_exact():
            raise RuntimeError("a plugin says that the repeated passes of a step were not exact (build_step_check)")

    def update(self, lr: float, weight_decay: float) -> StepResult:
        """The update of the inner stepper; the metric `repeated_steps` is added."""
        result = self.stepper.update(lr, weight_decay)
        repeated = result.loss.new_full((), self.num_repeated)
        return replace(result, figures={**result.figures, "repeated_steps": repeated})

    def outputs(self, micro_batches: Iterable[RankBatch]) -> list[Mapping[str, Tensor]]:
        """The outputs, by the inner stepper."""
        return cast("ForwardStepper", self.stepper).outputs(micro_batches)

    def evaluate(self, micro_batches: Iterable[RankBatch]) -> Tensor:
        """The mean loss, by the inner stepper."""
        return self.stepper.evaluate(micro_batches)

    def _were_exact(self) -> bool:
        """Ask all checks: each has a state of its own."""
        answers = [check() for check in self.checks]
        return all(answers)
