"""Heartbeats: reports about the progress of a process, which a separate thread makes once a second.

The main thread records each activity when it begins (`Durations.begin`). The heartbeat thread makes a `Beat` of it
(`Heartbeats.next`) and adds the number of collectives that the process has begun and the source line of its main
thread. `mplug_watchdog.transport` sends the beats. `mplug_watchdog.listener` finds, from the beats of all processes,
the ranks for which the others wait.
"""

import functools
import linecache
import os
import socket
import sys
import sysconfig
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from mplug import READING, Activity, listed

TICK = 1.0
"""Seconds between two heartbeats."""
LONGEST_WRITE = 6 * 3600.0
"""Seconds that a rank may wait for an asynchronous write, whose duration depends on the storage."""


@dataclass(frozen=True)
class Limits:
    """The settings of the plugin, in seconds."""

    timeout: float
    first: float
    multiple: float


class Durations:
    """The current activity of a process's main thread, and the longest activity of each kind so far.

    `begin` stores a few numbers and costs about a microsecond. `clock` counts the seconds in which this process ran.
    The heartbeat thread advances it, so it stops while the process is suspended.
    """

    def __init__(self) -> None:
        self.activity = Activity()
        self.clock = self._start = 0.0
        self._longest: dict[str, float] = {}
        self._completed: dict[str, int] = {}

    def begin(self, activity: Activity) -> None:
        """Record that the main thread ends its activity and begins another one.

        The longest duration of each repeated activity is stored. The first duration includes compilation, so the
        second one replaces it. After a change of the layout, all durations are unknown again.
        """
        ended = self.activity.name
        if ended in Activity.PHRASES:
            seconds, completed = self.clock - self._start, self._completed.get(ended, 0)
            self._longest[ended] = max(self._longest[ended], seconds) if completed > 1 else seconds
            self._completed[ended] = completed + 1
        if ended == Activity.RELAYOUT:
            self._longest, self._completed = {}, {}
        self._start = self.clock
        self.activity = activity

    def begin_ending(self, reason: str) -> None:
        """Record that an error ends the process."""
        self.begin(Activity(f"ending with {reason}", number=self.activity.number + 1))

    @property
    def measured(self) -> bool:
        """Whether the process has completed this kind of activity before, so that its duration is known."""
        return self.activity.name in self._longest

    def allowed(self, limits: Limits) -> float:
        """The maximum number of seconds without progress in the current activity."""
        if self.activity.name == Activity.WRITING:
            return max(limits.timeout, limits.first, LONGEST_WRITE)
        longest = self._longest.get(self.activity.name)
        return max(limits.timeout, limits.first if longest is None else limits.multiple * longest)


@dataclass(frozen=True)
class Beat:
    """One heartbeat: the progress and the limits of one process at one moment."""

    rank: int
    number: int
    host: str
    pid: int
    born: str
    """The start time of the process in the kernel's clock ticks; `pid` and `born` together identify the process."""
    phrase: str
    """The current activity, as an error names it."""
    entered: int
    """Number of activities that the main thread has begun; all ranks of a run begin the same ones in the same order."""
    collectives: Mapping[str, int]
    """Number of collectives that the process has begun, by process group; those of saves only during a save."""
    quiet: float
    """Seconds in which the process ran without progress."""
    allowed: float
    """Maximum of `quiet` in the current activity."""
    timeout: float
    """Maximum number of seconds between two heartbeats."""
    first: float
    """Maximum number of seconds until the first heartbeat."""
    at: str
    """The position of the main thread: file, line and function."""
    reads: bool = False
    """Whether the main thread waits for the data loader."""
    waits: bool = False
    """Whether the main thread seems to wait for other ranks."""
    last_collectives: Sequence[Mapping[str, Any]] = ()
    """The last collective of each group (`mplug_watchdog.recorder.Entered`), if the process makes no progress."""
    over: bool = False
    """Whether this is the last heartbeat of a process that has finished its work."""
    ahead: float = 0.0
    """Seconds by which the clock of the machine is ahead of its monotonic clock (`clocks`)."""
    kernel: str = ""
    """The kernel and the namespace in which `pid` is valid (`kernel`)."""
    silent: Sequence[Mapping[str, Any]] = ()
    """Of rank 0: the processes (`process_of`) from which no heartbeat arrives; processes beside them look for them."""


@dataclass(frozen=True)
class Place:
    """The position of a main thread in the code; `mark` changes when the thread moves."""

    at: str
    mark: int
    reads: bool
    waits: bool


CollectiveCounts = Mapping[str, Mapping[str, int]]
"""The number of collectives begun, by thread ('main', 'saves') and process group (`Run.collectives_begun`)."""


@dataclass
class Heartbeats:
    """Makes the heartbeats of one process. `collectives` and `place` read the state that a heartbeat reports."""

    rank: int
    durations: Durations
    limits: Limits
    collectives: Callable[[], CollectiveCounts]
    place: Callable[[], Place]
    recorded: Callable[[], Sequence[Mapping[str, Any]]] = list
    ahead: Callable[[], float] = float
    _last: Sequence[Mapping[str, Any]] = ()
    _number: int = 0
    _quiet: float = 0.0
    _progress: object = None

    def next(self, seconds: float, over: bool = False) -> Beat:
        """The next heartbeat, `seconds` after the one before it.

        A new activity or a new collective counts as progress. In an activity of unknown duration (the first step,
        building, loading), a main thread that moves counts as progress too: it may compile or read a large file.
        """
        seconds = min(seconds, 2 * TICK)  # a longer gap means that the process was suspended
        place, begun = self.place(), self.collectives()
        self.durations.clock += seconds
        activity = self.durations.activity
        progress = (activity.number, begun, 0 if self.durations.measured else place.mark)
        self._quiet = self._quiet + seconds if progress == self._progress else 0.0
        collectives = dict(begun["main"])
        if activity.name in (Activity.SAVING, Activity.WRITING):  # otherwise, only the thread of a save begins the rest
            collectives |= begun["saves"]
        self._progress = progress
        self._number += 1
        if self._quiet < self._recorded_after:
            self._last = ()
        elif not self._last:  # once: the process makes no progress meanwhile
            self._last = self.recorded()
        return Beat(
            rank=self.rank,
            number=self._number,
            host=socket.gethostname(),
            pid=os.getpid(),
            born=born(os.getpid()),
            phrase=activity.phrase,
            entered=activity.number,
            collectives=collectives,
            quiet=self._quiet,
            allowed=self.durations.allowed(self.limits),
            timeout=self.limits.timeout,
            first=max(self.limits.timeout, self.limits.first),
            at=place.at,
            reads=place.reads,
            waits=place.waits,
            last_collectives=self._last,
            over=over,
            ahead=self.ahead(),
            kernel=kernel(),
        )

    @property
    def _recorded_after(self) -> float:
        """Seconds without progress after which heartbeats contain the last collectives."""
        return max(TICK, min(self.limits.timeout, self.durations.allowed(self.limits)) / 2)


def named_ranks(ranks: Sequence[int]) -> str:
    """'rank 2', or 'ranks 0, 1 and 2'."""
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {listed(map(str, sorted(ranks)))}"


def born(pid: int) -> str:
    """The start time of a process in the kernel's clock ticks: /proc/pid/stat, field 22, see proc(5).

    It is empty if the process does not exist or has died and its parent has not noticed, or if the system has no /proc.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return "" if fields[0] in "ZX" else fields[19]
    except (OSError, IndexError):
        return ""


@functools.cache
def kernel() -> str:
    """What identifies the running kernel and the namespace of process ids; empty if the system has no /proc."""
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def process_of(beat: Beat) -> dict[str, Any]:
    """What finds the process of a heartbeat on its machine."""
    return {name: getattr(beat, name) for name in ("rank", "host", "pid", "born", "kernel")}


def has_ended(process: Mapping[str, Any]) -> bool:
    """Whether a process (`process_of`) was one of this machine, and does not exist any more."""
    is_here = process["host"] == socket.gethostname() and process["kernel"] == kernel() != ""
    return is_here and bool(process["born"]) and born(process["pid"]) != process["born"]


LIBRARIES = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib"))


def main_thread() -> Place:
    """The position of this process's main thread.

    `at` is the innermost frame outside of torch and Python's library, because that line identifies the fault.
    """
    innermost = sys._current_frames().get(threading.main_thread().ident or 0)
    frames: list[FrameType] = []
    while innermost is not None:
        frames.append(innermost)
        innermost = innermost.f_back
    if not frames:
        return Place("an unknown place", 0, reads=False, waits=False)
    caller = next((frame for frame in frames if not _of_library(frame.f_code.co_filename)), frames[0])
    files = [frame.f_code.co_filename for frame in frames]
    line = linecache.getline(caller.f_code.co_filename, caller.f_lineno or 0)  # None between two lines of a frame
    return Place(
        f"{'/'.join(Path(caller.f_code.co_filename).parts[-2:])}:{caller.f_lineno} in {caller.f_code.co_name}",
        hash(tuple((id(frame.f_code), frame.f_lasti) for frame in frames)),
        reads=any(frame.f_code in READING for frame in frames),
        waits=any("/torch/distributed/" in file for file in files) or "wait(" in line,
    )


@functools.cache
def _of_library(file: str) -> bool:
    """Whether a file belongs to Python's library or to torch."""
    installed = "site-packages" in file
    return "/torch/" in file or file.startswith("<") or (file.startswith(LIBRARIES) and not installed)
