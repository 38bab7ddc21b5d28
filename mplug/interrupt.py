"""Ending a run between two steps when the user or the machine asks for it, or time runs out."""

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress

from mplug.run import Run
from mplug.signals import Signals

STDERR = 2
HEARD = b"stopping: the step under way is finished and saved first; asked once more, it ends at once\n"


class Interrupt(Signals):
    """Lets the loop end after a whole step at the first SIGINT or SIGTERM; a later one ends it at once."""

    def __init__(self, run: Run) -> None:
        self.run = run

    def first(self, number: int) -> None:
        """Ask the run to stop."""
        self.run.stop_requested = True
        if number == signal.SIGINT and self.run.rank == 0:  # SIGTERM also comes to those whose neighbour has died
            below = b"\n" if os.isatty(STDERR) else b""
            with suppress(OSError):  # nobody hears
                os.write(STDERR, below + HEARD)  # print() may be under way, and cannot be entered twice

    def later(self, number: int) -> None:
        """Do what the signal did before the run."""
        signal.signal(number, self.previous[signal.Signals(number)])
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
