"""What the host asks of the package that evaluates runs."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from mplug.registry.provided import provided
from mplug.run.run import Run
from mplug.training.assembly import Parts


@dataclass(frozen=True)
class Evaluation:
    """The loss, or None if the evaluation ended early; `stop` (equal on all ranks) says whether a rank must stop.

    Without any target (`has_targets`), the loss is not a number.
    """

    loss: float | None
    stop: bool
    has_targets: bool = True


class Validation(Protocol):
    """The method of the class in the entry-point group 'mplug.validations'.

    Without an installed class, a run has no validation data.
    """

    def evaluate_unless_stopped(self, run: Run, parts: Parts, due: Callable[[float], bool]) -> Evaluation:
        """Evaluate; if any rank is asked to stop in the meantime, all ranks end before the same micro batch.

        `due(seconds)` says whether the run must stop now, if it takes `seconds` until the evaluation ends.
        """


def evaluate_unless_stopped(run: Run, parts: Parts, due: Callable[[float], bool]) -> Evaluation:
    """Evaluate a run with validation data."""
    found: Validation | None = provided("validations")
    assert found is not None, "validation data are only read if a package evaluates runs"
    return found.evaluate_unless_stopped(run, parts, due)
