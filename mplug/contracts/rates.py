"""What a learning rate schedule is: a function of the step and of the settings of the run."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class RateSettings:
    """The settings of a run that decide its learning rate.

    `peak` is the rate at the end of the warm-up, and `floor` the minimum afterwards, at most the peak. `decay_steps` is
    None if the config leaves it to the schedule.
    """

    peak: float
    floor: float
    warmup_steps: int
    decay_steps: int | None
    total_steps: int

    def between(self, share: float) -> float:
        """The rate with this share (0 to 1) of the way from the minimum to the peak."""
        return self.floor + (self.peak - self.floor) * share

    def after_warmup(self, step: int) -> float:
        """The part of a decay that is done (0 to 1), which begins after the warm-up; by default, it is the rest."""
        return _part(step - self.warmup_steps, self.decay_steps or max(1, self.total_steps - self.warmup_steps))

    def at_the_end(self, step: int) -> float:
        """The part of a decay that is done, which ends with the run; by default, it is the last fifth of the run."""
        decay = self.decay_steps or max(1, self.total_steps // 5)
        return _part(step - (self.total_steps - decay), decay)


RateSchedule = Callable[[int, RateSettings], float]
"""The learning rate of a step after the warm-up; the first step of a run is 1. It must not depend on anything else."""


def ends_with_run(schedule: RateSchedule) -> RateSchedule:
    """Declare that the decay of a schedule ends with the run. The host refuses a decay that is longer than the run."""
    schedule.ends_with_run = True  # type: ignore[attr-defined]
    return schedule


def _part(steps: int, whole: int) -> float:
    return min(max(steps / whole, 0.0), 1.0)
