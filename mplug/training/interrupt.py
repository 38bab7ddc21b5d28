"""Ending a run between two steps when the user or the machine asks for it, or time runs out."""

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress

from mplug.distributed.signals import Signals
from mplug.run.run import Run

STDERR = 2
HEARD = (
    b"stopping: a step under way is finished and saved, an evaluation is left; asked once more, the run ends at once\n"
)


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
        """End the run at once: SIGTERM ends the process, and SIGINT does what it did before the run."""
        ends = number == signal.SIGTERM  # the handler of the run's lock, below this one, would only ask once more
        signal.signal(number, signal.SIG_DFL if ends else self.previous[signal.Signals(number)])
        signal.raise_signal(number)


LEAVING = 10.0
"""Seconds that are left for processes to end."""


class TimeLeft:
    """Asks the run to stop so early that the steps until it does, the save and the processes end before `deadline`.

    An evaluation is left early, so its duration does not count.

    Rank 0's clock decides for all. `deadline` is in seconds since the epoch; None never comes. `save` tells how long a
    save may take until it is visible.
    """

    asked = False

    def __init__(self, run: Run, deadline: float | None, save: Callable[[], float]) -> None:
        self.run, self.deadline, self.save = run, deadline if run.rank == 0 else None, save
        self._longest = 0.0
        self._began: float | None = None

    def check(self) -> None:
        """Called after every step: it and what was saved after it took as long as the next may."""
        now, began = time.time(), self._began
        if began is not None:  # what the first step takes, no other does
            self._longest = max(self._longest, now - began)
        self._began = now
        self.ends_within(3 * self._longest)

    def ends_within(self, seconds: float) -> bool:
        """Whether the run must stop now, if it takes so many seconds until the save begins; then it is asked to."""
        if self.deadline is not None and time.time() + seconds + self.save() + LEAVING > self.deadline:
            self.asked = self.run.stop_requested = True
        return self.asked

    def leave_out(self, seconds: float) -> None:
        """So many seconds since the last step were of no step."""
        if self._began is not None:
            self._began += seconds
