"""Handle SIGINT and SIGTERM in two levels: the first signal requests an orderly stop, a later one forces it."""

import signal
import time
from types import FrameType
from typing import Self

SAME_SIGNAL = 2.0
"""Seconds within which signals count as one: a scheduler may signal each process as well as its launcher."""


class Signals:
    """Handles SIGINT and SIGTERM in a block; `signal` is the first one, received at `when` (monotonic clock)."""

    signal: int | None = None
    when = 0.0

    def first(self, number: int) -> None:
        """Called for the first signal."""
        raise NotImplementedError

    def later(self, number: int) -> None:
        """Called for each signal that comes more than `SAME_SIGNAL` seconds after the first."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        self.previous = {number: signal.signal(number, self._handle) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.signal is None:
            self.signal, self.when = number, time.monotonic()
            self.first(number)
        elif time.monotonic() - self.when > SAME_SIGNAL:
            self.later(number)
