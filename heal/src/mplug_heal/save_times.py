"""Save as often as loses the least time (`checkpoint.every=auto`), by the cost of a save and the rate of failures."""

import logging
import sys
import time
from collections.abc import Callable
from math import ceil

import torch

from mplug.run.run import Run
from mplug_heal.intervals import GPU_HOURS_BETWEEN_FAILURES, best_interval, lost_share

log = logging.getLogger("mplug")

FIRST = 10
"""Steps after the first one of a process until its first save, which measures what a save costs."""
NOTABLE = 1.5
"""The run prints its interval again if it has changed by this factor."""


class OptimalSaves:
    """The class of the entry-point group 'mplug.save_times'.

    Rank 0 measures, and its answer holds for all ranks. Evaluations count as time of steps: a failure repeats them too.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, *, what: str = "checkpoint") -> None:
        self._clock, self._what = clock, what
        self._since: tuple[int, float] | None = None
        self._next = 0
        self._printed = 0.0

    def is_due(self, run: Run) -> bool:
        """Whether the step that has just ended is to be saved."""
        if self._since is None:  # the first step of a process compiles, so the measurement begins after it
            self._since, self._next = (run.step, self._clock()), run.step + FIRST
        return run.step >= self._next

    def saved(self, run: Run, stall: float, durable: float) -> None:
        """A save has stopped training for `stall` seconds; it needs `durable` seconds until it is complete. Collective.

        The next save does not begin before this one is complete.
        """
        assert self._since is not None
        now, (step, began) = self._clock(), self._since
        per_step = max(now - stall - began, 1e-6) / max(run.step - step, 1)
        mean = mean_seconds(run)
        wanted = max(best_interval(stall, mean), durable)
        own = ceil(wanted / per_step) if run.rank == 0 else 0
        steps = int(run.summed(torch.tensor(float(own), dtype=torch.float64, device=run.device)))
        self._since, self._next = (run.step, now), run.step + steps
        if run.rank == 0:
            self._report(steps, steps * per_step, stall, mean)

    def exclude(self, seconds: float) -> None:
        """Training has paused: leave the time out of that of the steps."""
        if self._since is not None:
            self._since = (self._since[0], self._since[1] + seconds)

    def _report(self, steps: int, interval: float, stall: float, mean: float) -> None:
        sentence = (
            f"the next {self._what} follows after {steps:,} step{'s' * (steps != 1)} ({duration(interval)}): a save "
            f"stops training for {duration(stall)}, and the run expects a failure every {duration(mean)}; a failure "
            f"loses {duration(interval / 2)} of training on average, at most {duration(interval)}; saves and "
            f"repeated steps take {lost_share(stall, interval, mean):.2%} of the time"
        )
        log.info("%s", sentence)
        if not self._printed / NOTABLE < interval < self._printed * NOTABLE:
            print(f"mplug: {sentence}", file=sys.stderr, flush=True)
            self._printed = interval


def mean_seconds(run: Run) -> float:
    """The mean time between two failures of a run."""
    return mean_between(run, run.config.checkpoint.hours_between_failures)


def mean_between(run: Run, hours: float | None) -> float:
    """The mean time in seconds between two failures: `hours`, or that of Llama 3 for the number of ranks."""
    return 3600 * (GPU_HOURS_BETWEEN_FAILURES / run.mesh.world_size if hours is None else hours)


def duration(seconds: float) -> str:
    """A time in seconds as text, such as '3.2 min'."""
    for unit, length in (("days", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.2f} s"
