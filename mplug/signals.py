"""SIGINT and SIGTERM: the first asks, a later one insists."""

import signal
import time
from types import FrameType
from typing import Self

SAME = 2.0
"""Seconds within which signals are one: who stops a job may tell each process, and those that started them."""


class Signals:
    """Hears SIGINT and SIGTERM for a block; `signal` is the first that came, at `when` on the monotonic clock."""

    signal: int | None = None
    when = 0.0

    def first(self, number: int) -> None:
        """The first signal has come."""
        raise NotImplementedError

    def later(self, number: int) -> None:
        """Another has come, more than `SAME` seconds after the first."""
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
        elif time.monotonic() - self.when > SAME:
            self.later(number)
