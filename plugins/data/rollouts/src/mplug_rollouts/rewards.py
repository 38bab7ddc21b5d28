"""Rewards of completions, by functions that run in processes of their own and have a time limit."""

import json
import math
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from queue import SimpleQueue
from typing import IO, Any, NamedTuple
from weakref import finalize

from mplug import UsageError

START = 120.0
"""Seconds in which a process must have imported the functions."""
MISSING = math.nan
"""The reward of a completion that no function rewards, or whose function was ended."""


class TimedOut(Exception):
    """A function needed too many seconds, and its process was ended."""


class Rewarded(NamedTuple):
    """The rewards of a prompt's completions: their weighted sums, those of each function, and how many were ended."""

    totals: list[float]
    of_functions: list[list[float]]
    timeouts: int


@dataclass(frozen=True)
class Group:
    """The completions of a prompt as functions receive them: texts, or lists of messages; and the prompt's columns."""

    where: str
    prompt: Any
    completions: Sequence[Any]
    columns: Mapping[str, Any]


class Functions:
    """Functions of rewards by name, called in `num_processes` processes. Processes start when they are first needed."""

    def __init__(
        self, names: Sequence[str], weights: Sequence[float] | None, seconds: float, num_processes: int
    ) -> None:
        self.names, self.seconds = tuple(names), seconds
        self.weights = tuple(weights or [1.0] * len(names))
        self._free: SimpleQueue[Process] = SimpleQueue()
        processes = [Process(self.names) for _ in range(num_processes)]
        for process in processes:
            self._free.put(process)
        self._threads = ThreadPoolExecutor(num_processes, "rewards")
        self._end = finalize(self, _end_all, processes)

    def of(self, groups: Sequence[Group]) -> list[Rewarded]:
        """The rewards of the completions of each prompt. UsageError names a function that fails, and the prompt."""
        return list(self._threads.map(self._of_group, groups))

    def check(self) -> None:
        """UsageError if a function cannot be found."""
        process = self._free.get()
        try:
            process.start()
        finally:
            self._free.put(process)

    def close(self) -> None:
        """End the processes; they also end when nothing refers to this object any more."""
        self._threads.shutdown(wait=True, cancel_futures=True)
        self._end()

    def _of_group(self, group: Group) -> Rewarded:
        process, count = self._free.get(), len(group.completions)
        try:
            found, timeouts = [], 0
            for name in self.names:
                try:
                    found.append(process.call(name, group, self.seconds))
                except TimedOut:
                    found.append([MISSING] * count)
                    timeouts += 1
            return Rewarded([MISSING] * count if timeouts else self._totals(found), found, timeouts)
        finally:
            self._free.put(process)

    def _totals(self, found: list[list[float]]) -> list[float]:
        """The weighted sums; a function that does not apply to a completion adds nothing."""
        totals = []
        for values in zip(*found, strict=True):
            given = [
                weight * value for weight, value in zip(self.weights, values, strict=True) if not math.isnan(value)
            ]
            totals.append(sum(given) if given else MISSING)
        return totals


class Process:
    """A process that calls functions, one call at a time."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names
        self._process: subprocess.Popen[bytes] | None = None
        self._unread = b""

    def start(self) -> None:
        """Start it, if it does not run. UsageError if it finds a function not."""
        if self._process is not None:
            return
        command = [sys.executable, "-m", "mplug_rollouts.worker", *self.names]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, start_new_session=True)  # without Ctrl-C
        self._unread = b""
        try:
            faults = self._answer(START, f"the import of data.rewards={[*self.names]}")["faults"]
        except TimedOut:
            raise UsageError(
                f"data.rewards={[*self.names]}: the modules were not imported within {START:g} seconds; make them "
                f"import faster"
            ) from None
        if faults:
            self.end()
            name, fault = next(iter(faults.items()))
            raise UsageError(
                f"data.rewards: cannot find '{name}': {fault}; name a function as module:function, of a module that "
                f"Python finds or of the current folder, as file.py:function, or by an installed entry point"
            )

    def call(self, name: str, group: Group, seconds: float) -> list[float]:
        """The rewards by one function, NaN for None. TimedOut after so many seconds; the process has then ended."""
        self.start()
        count = len(group.completions)
        columns = {key: [value] * count for key, value in group.columns.items()}
        request = {"function": name, "prompts": [group.prompt] * count, "completions": [*group.completions]}
        assert self._process is not None
        stream = _piped(self._process.stdin)
        try:
            stream.write(json.dumps({**request, "columns": columns}).encode() + b"\n")
            stream.flush()
        except BrokenPipeError:
            pass  # the answer says that the process has ended
        answer = self._answer(seconds, f"the reward '{name}' on the prompt of {group.where}")
        if "error" in answer:
            raise UsageError(
                f"the reward '{name}' failed on the prompt of {group.where}: {answer['error']}; correct the function, "
                f"or let it return None for completions that it does not reward"
            )
        return [MISSING if one is None else float(one) for one in answer["rewards"]]

    def end(self) -> None:
        """End it at once, and the programs that functions have started."""
        if self._process is not None:
            if self._process.poll() is None:
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            for stream in (self._process.stdin, self._process.stdout):
                _close(stream)
            self._process = None

    def _answer(self, seconds: float, what: str) -> Any:
        """The next line of the process."""
        assert self._process is not None
        number, deadline = _piped(self._process.stdout).fileno(), time.monotonic() + seconds
        while b"\n" not in self._unread:
            ready, _, _ = select.select([number], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                self.end()
                raise TimedOut
            part = os.read(number, 1 << 16)
            if not part:
                status = self._process.wait()
                self.end()
                raise UsageError(f"{what} ended its process with status {status}; correct the function")
            self._unread += part
        line, _, self._unread = self._unread.partition(b"\n")
        return json.loads(line)


def _end_all(processes: "Sequence[Process]") -> None:
    for process in processes:
        process.end()


def _piped(stream: IO[bytes] | None) -> IO[bytes]:
    assert stream is not None
    return stream


def _close(stream: IO[bytes] | None) -> None:
    try:
        _piped(stream).close()
    except BrokenPipeError:
        return  # the process has ended before it read what was written
