"""The pipes between the launcher and its processes: signals in one direction, messages in the other."""

import multiprocessing
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import connection
from multiprocessing.connection import Connection
from typing import Any

from mplug.distributed.signals import Signals
from mplug.errors import Diverged, PluginError, RunError, UsageError
from mplug_launch.supervision import Monitor, PluginMessage

AT_ONCE = 0.3
"""Maximum number of seconds by which the launcher may notice a death later than the errors that it causes elsewhere."""
TERMINATED = "terminated"
"""The message of a process that ends because the launcher sent SIGTERM; it has not failed."""


class PortInUse(UsageError):
    """The port at which processes would meet is in use."""


PASSED_UNCHANGED: dict[str, type[UsageError | RunError]] = {
    error.__name__: error for error in (UsageError, PortInUse, RunError, Diverged)
}
"""Errors of a process that the launcher raises unchanged, because their message addresses the user."""


def cause_of_death(exit_code: int) -> str:
    """How a process died that sent no error; a negative status is the number of a signal."""
    if exit_code < 0:
        return f"of {signal.Signals(-exit_code).name}"
    return "without an error message, for example by SIGKILL or because memory ran out"


@dataclass(frozen=True)
class Started:
    """The first message of a process. Its process id is also the id of its process group."""

    pid: int


class Pipe:
    """A process's end of the pipe to the launcher; all threads of the process may use it."""

    def __init__(self, line: Connection) -> None:
        self._line, self._lock = line, threading.RLock()  # a signal may interrupt the main thread while it sends

    def send(self, message: object) -> None:
        """Send a message; drop that of a plugin if the pipe is full, because the launcher may be suspended."""
        with self._lock:
            if not isinstance(message, PluginMessage) or select.select([], [self._line], [], 0)[1]:
                self._line.send(message)

    def recv(self) -> Any:
        """Wait for the launcher's next message."""
        return self._line.recv()

    def poll(self, seconds: float) -> bool:
        """Wait at most so many seconds for the launcher's next message: whether there is one."""
        return self._line.poll(seconds)


class Pipes:
    """The launcher's pipes to its processes: it sends signals, and receives messages.

    A process sends `Started`, the number of each step that it starts, messages of a plugin for `monitor`, and at its
    end "done", "terminated" or its error. A process whose pipe closes without one of these three was killed. The
    launcher needs these messages because elastic reports one failure only. This may be the failure of a process whose
    connection broke when another process died.
    """

    def __init__(self, size: int, monitor: Monitor | None = None) -> None:
        pairs = [multiprocessing.Pipe() for _ in range(size)]
        self.child_ends = [child_end for _, child_end in pairs]
        self.own_ends = {own_end: rank for rank, (own_end, _) in enumerate(pairs)}
        self.ends: list[tuple[float, int, Any]] = []
        """(time, rank, last message or None) of every process that has ended or is about to end."""
        self.steps: dict[int, int] = {}
        self.pids: dict[int, int] = {}
        self.monitor = monitor
        self.last_look = time.monotonic()

    def listen(self, seconds: float) -> None:
        """Receive the messages of the processes; wait at most `seconds` for the first."""
        if not self.own_ends:
            time.sleep(seconds)
        for line in connection.wait(list(self.own_ends), seconds) if self.own_ends else ():
            assert isinstance(line, Connection)
            rank = self.own_ends.get(line)
            if rank is None:  # a second signal has closed the pipe in the meantime
                continue
            try:
                message = line.recv()
                if isinstance(message, Started):
                    self.pids[rank] = message.pid
                elif self.hears(rank, message):
                    pass
                elif isinstance(message, PluginMessage):
                    if self.monitor is not None:
                        self.monitor.hear(self.rank_of(rank), message.content)
                elif isinstance(message, int):
                    self.steps[rank] = message
                    if self.monitor is not None:
                        self.monitor.begin_step(self.rank_of(rank), message)
                else:
                    self._end(rank, message)
            except (EOFError, OSError):
                self._end(rank, None)
                self.own_ends.pop(line, None)
        if self.child_ends and len(self.pids) == len(self.child_ends):
            self._close_child_ends()

    def hears(self, rank: int, message: object) -> bool:
        """Whether a message is one of another launcher, which has received it."""
        return False

    def rank_of(self, process: int) -> int:
        """The rank of a process; launchers that change ranks number their processes."""
        return process

    def processes_of(self, ranks: Sequence[int]) -> Sequence[int]:
        """The numbers of the processes with these ranks."""
        return ranks

    def _end(self, rank: int, message: Any, seconds_ago: float = 0.0) -> None:
        """Record the end of a process with its last message, or None if it sent none."""
        self.ends.append((time.monotonic() - seconds_ago, rank, message))
        if self.monitor is not None:
            self.monitor.leave(self.rank_of(rank))

    def end_hang(self) -> None:
        """Kill the processes that hang, as the monitor reports, and record their failure as the first."""
        now = time.monotonic()
        elapsed, self.last_look = now - self.last_look, now
        hang = self.monitor.hang(elapsed) if self.monitor is not None else None
        if hang is None or self._failures():
            return
        for rank in self.processes_of(hang.ranks):
            self._end(rank, (RunError.__name__, hang.sentence), seconds_ago=2 * AT_ONCE)
            self._kill(rank)

    def _kill(self, rank: int) -> None:
        """Kill a process and its children with SIGKILL, which also works on stopped processes."""
        if rank in self.pids and rank in self.own_ends.values():
            with suppress(ProcessLookupError):
                os.killpg(self.pids[rank], signal.SIGKILL)

    def _close_child_ends(self) -> None:
        """Close the launcher's copies of the processes' ends, so that the death of a process closes its pipe."""
        for end in self.child_ends:
            end.close()
        self.child_ends = []

    def failed_before(self, when: float) -> bool:
        """Whether a process died before the time `when`, or has reported an error."""
        return any(message is not None or failed < when for failed, _, message in self._failures())

    def failing_for(self) -> float:
        """Seconds since the first process failed or was terminated; 0 if there was none."""
        ended = [when for when, _, message in self.ends if message == TERMINATED]
        ended += [when for when, _, _ in self._failures()]
        return time.monotonic() - min(ended) if ended else 0.0

    def _failures(self) -> list[tuple[float, int, Any]]:
        """(time, rank, error message or None) of every failed process.

        A process that dies breaks the connections of others, whose errors may arrive before its death is noticed. So
        the time of a death is moved `AT_ONCE` seconds back, before those errors.
        """
        reported = {rank for _, rank, message in self.ends if message is not None}
        return [
            (when - (AT_ONCE if message is None else 0), rank, message)
            for when, rank, message in self.ends
            if isinstance(message, tuple) or (message is None and rank not in reported)
        ]

    def first_failure(self, exit_codes: Mapping[int, int]) -> UsageError | RunError | None:
        """The error of the first process that failed, with the type that it had there; None if no process failed."""
        first = min(self._failures(), default=None, key=lambda failure: failure[0])
        if first is None:
            return None
        _, rank, message = first
        if message is None:
            return RunError(f"{self._rank_name(rank)} died {cause_of_death(exit_codes.get(rank, 0))}")
        kind, text = message
        if kind == PluginError.__name__:
            return PluginError(f"rank {rank} on {socket.gethostname()}: {text}")
        if kind in PASSED_UNCHANGED:
            return PASSED_UNCHANGED[kind](text)
        return RunError(f"{self._rank_name(rank)} failed with {kind}: {text}")

    def _rank_name(self, rank: int) -> str:
        where = f"in step {self.steps[rank]}" if rank in self.steps else "before its first step"
        return f"rank {self.rank_of(rank)} on {socket.gethostname()}, {where},"

    def kill(self) -> None:
        """Kill all processes at once, including stopped ones."""
        for rank in list(self.own_ends.values()):
            self._kill(rank)
        self.close()

    def close(self) -> None:
        """Close all pipes; processes that still run then end."""
        self._close_child_ends()
        for line in list(self.own_ends):
            line.close()
        self.own_ends = {}


class Handler(Signals):
    """Forwards the first SIGINT or SIGTERM to the processes; a later one kills them."""

    def __init__(self, pipes: Pipes) -> None:
        self.pipes = pipes

    def first(self, number: int) -> None:
        """Forward the signal."""
        for line in list(self.pipes.own_ends):
            with suppress(OSError):  # that process has ended
                line.send(number)

    def later(self, number: int) -> None:
        """Kill the processes."""
        self.pipes.kill()
