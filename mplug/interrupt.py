"""Ending a run between two steps when the user or the machine asks for it, or time runs out."""

import signal
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, Self

from mplug.run import Run

SAME = 2.0
"""Seconds within which signals are one: who stops a job may tell each process, and those that started them."""


class Interrupt:
    """Remembers the first SIGINT or SIGTERM, so that the loop ends after a whole step; a later one ends it at once."""

    signal: int | None = None
    _when = 0.0

    def __init__(self, run: Run) -> None:
        self.run = run

    def __enter__(self) -> Self:
        self._previous = {number: signal.signal(number, self._remember) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: Any) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        if self.signal is None:
            self.signal, self._when = number, time.monotonic()
            self.run.stop_requested = True
        elif time.monotonic() - self._when > SAME:
            signal.signal(number, self._previous[signal.Signals(number)])
            signal.raise_signal(number)


LEAVING = 10.0
"""Seconds that are left for processes to end."""


class TimeLeft:
    """Asks the run to stop so early that the steps until it does, the save and the processes end before `deadline`.

    Rank 0's clock decides for all. `deadline` is in seconds since the epoch; None never comes. `save` tells how long a
    save may take until it is visible.
    """

    asked = False

    def __init__(self, run: Run, deadline: float | None, save: Callable[[], float]) -> None:
        self.run, self.deadline, self.save = run, deadline if run.rank == 0 else None, save
        self._longest = 0.0
        self._began: float | None = None

    def check(self) -> None:
        """Called after every step: it, what was evaluated and saved after it, took as long as the next may."""
        now, began = time.time(), self._began
        if began is not None:  # what the first step takes, no other does
            self._longest = max(self._longest, now - began)
        self._began = now
        if self.deadline is not None and now + 3 * self._longest + self.save() + LEAVING > self.deadline:
            self.asked = self.run.stop_requested = True
