"""Ending a run between two steps when the user or the machine asks for it."""

import signal
from types import FrameType
from typing import Any, Self

from mplug.run import Run


class Interrupt:
    """Remembers the first SIGINT or SIGTERM, so that the loop ends after a whole step; a second one ends it at once."""

    signal: int | None = None

    def __init__(self, run: Run) -> None:
        self.run = run

    def __enter__(self) -> Self:
        self._previous = {number: signal.signal(number, self._remember) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: Any) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self.signal = number
        self.run.stop_requested = True
        signal.signal(number, self._previous[signal.Signals(number)])
