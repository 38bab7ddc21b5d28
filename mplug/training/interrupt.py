"""End a run between two steps: after SIGINT or SIGTERM, or before its deadline."""

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress

from mplug.distributed.signals import Signals
from mplug.run.run import Run

STDERR = 2
STOPPING = (
    b"stopping: the run finishes and saves the current step, and cancels an evaluation; "
    b"a second Ctrl-C ends it at once\n"
)
"""Printed at the first SIGINT."""


class Interrupt(Signals):
    """Ends the loop after the current step at the first SIGINT or SIGTERM; a later signal ends the run at once."""

    def __init__(self, run: Run) -> None:
        self.run = run

    def first(self, number: int) -> None:
        """Ask the run to stop after the current step."""
        self.run.stop_requested = True
        if number == signal.SIGINT and self.run.rank == 0:  # a launcher sends SIGTERM too, when another rank has died
            newline = b"\n" if os.isatty(STDERR) else b""
            with suppress(OSError):  # stderr is closed
                os.write(STDERR, newline + STOPPING)  # the signal may have interrupted print(), which is not reentrant

    def later(self, number: int) -> None:
        """End the run at once: SIGTERM ends the process, and SIGINT calls the handler from before the run."""
        ends = number == signal.SIGTERM  # the previous handler, of the run's lock, would not end the process
        signal.signal(number, signal.SIG_DFL if ends else self.previous[signal.Signals(number)])
        signal.raise_signal(number)


LEAVING = 10.0
"""Seconds reserved for the processes to end."""


class TimeLeft:
    """Asks the run to stop early enough that its last steps, the save and the processes end before `deadline`.

    The run cancels an evaluation when it stops, so evaluations do not count. Rank 0's clock decides for all ranks.
    `deadline` is in seconds since the epoch; None means no deadline. `save` returns the seconds that a save may take
    until the checkpoint is visible.
    """

    expired = False

    def __init__(self, run: Run, deadline: float | None, save: Callable[[], float]) -> None:
        self.run, self.deadline, self.save = run, deadline if run.rank == 0 else None, save
        self._longest = 0.0
        self._last_check: float | None = None

    def check(self) -> None:
        """Call this after every step. The longest step so far, with its save, bounds the duration of the next."""
        now, last = time.time(), self._last_check
        if last is not None:  # the first step includes compilation, so it does not count
            self._longest = max(self._longest, now - last)
        self._last_check = now
        self.ends_within(3 * self._longest)

    def ends_within(self, seconds: float) -> bool:
        """Whether the run must stop now, if the save can begin in `seconds`; if so, ask the run to stop."""
        if self.deadline is not None and time.time() + seconds + self.save() + LEAVING > self.deadline:
            self.expired = self.run.stop_requested = True
        return self.expired

    def skip_step(self) -> None:
        """Leave out the time since the last check and the next step, which compiles: the layout has changed."""
        self._last_check = None

    def exclude(self, seconds: float) -> None:
        """Exclude `seconds` since the last check from the duration of the step."""
        if self._last_check is not None:
            self._last_check += seconds
