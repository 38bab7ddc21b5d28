"""The HTTP server on a socket: it stops within a time, and closes connections that send no request."""

import asyncio
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn

LINGER = 2.0
"""Seconds in which clients may read the ends of their answers after the time in which answers may end."""


class Server(uvicorn.Server):
    """A server whose process goes on after a signal has stopped it.

    A signal lets it accept no new connection. `grace` seconds later it calls `end_answers`; connections that are still
    open `LINGER` seconds after that are cut. A connection may be open for `seconds` without a whole head of a request.
    """

    def __init__(self, app: Any, seconds: float, grace: float, end_answers: Callable[[], None]) -> None:
        options: dict[str, Any] = {"access_log": False, "lifespan": "off", "ws": "none", "server_header": False}
        super().__init__(uvicorn.Config(app, log_level="error", **options))
        self.seconds, self.grace, self.end_answers = seconds, grace, end_answers
        self._silent: dict[Any, tuple[Any, float]] = {}

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle signals while the server runs, without those that uvicorn raises again at its end."""
        numbers = (signal.SIGINT, signal.SIGTERM)
        before = [signal.signal(number, self.handle_exit) for number in numbers]
        try:
            yield
        finally:
            for number, handler in zip(numbers, before, strict=True):
                signal.signal(number, handler)

    async def on_tick(self, counter: int) -> bool:
        """Ten times a second."""
        if counter % 10 == 0:
            self._close_silent(time.monotonic())
        return await super().on_tick(counter)

    async def shutdown(self, sockets: Any = None) -> None:
        """Wait for answers, end them, and cut the connections of clients that do not read."""
        loop = asyncio.get_running_loop()
        timers = [loop.call_later(self.grace, self.end_answers), loop.call_later(self.grace + LINGER, self._cut)]
        await super().shutdown(sockets)
        for timer in timers:
            timer.cancel()

    def _close_silent(self, now: float) -> None:
        """Close the connections on which no request has come for too long."""
        before, self._silent = self._silent, {}
        for connection in self.server_state.connections:
            last: Any = connection.cycle  # type: ignore[union-attr]
            if last is None or last.response_complete:
                known, since = before.get(connection, (last, now))
                self._silent[connection] = last, since if known is last else now
        for connection, (_, since) in self._silent.items():
            if now - since > self.seconds:
                connection.transport.close()

    def _cut(self) -> None:
        for connection in list(self.server_state.connections):
            connection.transport.abort()
