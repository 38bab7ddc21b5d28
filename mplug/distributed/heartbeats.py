"""Heartbeats: what a process of a run reports about itself once a second, from a thread of its own.

The main thread only notes what it begins (`Pulse.enter`). A thread adds how many collectives the process has begun and
where the main thread is (`Heart.beat`). `mplug.distributed.watchdog` decides from the beats of all processes which rank
the others wait for; `mplug.distributed.heartbeat_transport` carries the beats.
"""

import functools
import linecache
import os
import socket
import sys
import sysconfig
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType

TICK = 1.0
"""Seconds between two heartbeats."""
STEP, EVALUATION, SAVING = "step", "evaluation", "saving"
PHRASES = {STEP: "in step {}", EVALUATION: "in the evaluation after step {}", SAVING: "saving step {}"}
"""Activities that a run repeats, as an error names them. Any other activity is named by its own words."""
WRITING = "waiting until a checkpoint is written"
"""The duration of an asynchronous write depends on the storage, and no earlier activity predicts it."""
LONGEST_WRITE = 6 * 3600.0
"""Seconds that a rank may wait for an asynchronous write."""
SAVES = "mplug saves"
"""The description of the process group in which a thread of an asynchronous save communicates
(mplug.distributed.groups).
"""


@dataclass(frozen=True)
class Limits:
    """The section `watchdog` of the config, in seconds."""

    timeout: float
    first: float
    multiple: float


class Pulse:
    """What the main thread of a process does now. `enter` stores a few numbers and costs about a microsecond.

    `clock` counts the seconds in which this process ran: the thread that beats advances it, so it stands still while
    the process is suspended. `tell` receives the number of every step that begins.
    """

    tell: Callable[[int], None] | None = None

    def __init__(self) -> None:
        self.activity, self.step, self.entered = "starting", 0, 0
        self.clock = self._began = 0.0
        self._longest: dict[str, float] = {}
        self._completed: dict[str, int] = {}

    def enter(self, activity: str, step: int = 0) -> None:
        """The main thread begins an activity, which ends the one before it.

        The second duration of a kind replaces the first, which includes compilation. Later ones take the maximum.
        """
        if self.activity in PHRASES:
            seconds, completed = self.clock - self._began, self._completed.get(self.activity, 0)
            self._longest[self.activity] = max(self._longest[self.activity], seconds) if completed > 1 else seconds
            self._completed[self.activity] = completed + 1
        self._began = self.clock
        self.activity, self.step = activity, step
        self.entered += 1
        if self.tell is not None and activity == STEP:
            self.tell(step)

    @property
    def words(self) -> str:
        """'in step 12', 'building the model'."""
        return PHRASES.get(self.activity, self.activity).format(self.step)

    @property
    def measured(self) -> bool:
        """Whether the process has done this activity before, so that its duration is known."""
        return self.activity in self._longest

    def allowed(self, limits: Limits) -> float:
        """Seconds without progress that are no fault in this activity."""
        if self.activity == WRITING:
            return max(limits.timeout, limits.first, LONGEST_WRITE)
        longest = self._longest.get(self.activity)
        return max(limits.timeout, limits.first if longest is None else limits.multiple * longest)


@dataclass(frozen=True)
class Beat:
    """One heartbeat."""

    rank: int
    number: int
    host: str
    pid: int
    born: str
    """When the process began, as the kernel counts: together with `pid` it is of this process and of no other."""
    words: str
    entered: int
    """How many activities the main thread has begun; all ranks of a run begin the same ones in the same order."""
    collectives: Mapping[str, int]
    """How many collectives the main thread has begun in each process group. Those of saves count while it saves."""
    quiet: float
    """Seconds in which the process ran without progress."""
    allowed: float
    """How long it may do so."""
    timeout: float
    """How long the process may send no heartbeat."""
    first: float
    """How long it may take until its first heartbeat."""
    at: str
    """Where the main thread is: file, line and function."""
    reads: bool = False
    """Whether the main thread waits for the data loader."""
    waits: bool = False
    """Whether the main thread seems to wait for other ranks."""
    over: bool = False
    """Whether this is the last heartbeat of a process that has done its work."""


@dataclass(frozen=True)
class Place:
    """Where the main thread is; `mark` changes when it moves."""

    at: str
    mark: int
    reads: bool
    waits: bool


@dataclass
class Heart:
    """Makes the heartbeats of one process."""

    rank: int
    pulse: Pulse
    limits: Limits
    collectives: Callable[[], Mapping[str, int]]
    place: Callable[[], Place]
    _number: int = 0
    _quiet: float = 0.0
    _seen: object = None

    def beat(self, seconds: float, over: bool = False) -> Beat:
        """The next heartbeat, `seconds` after the one before it.

        Progress is a new activity or a new collective. In an activity of unknown duration (the first step, building,
        loading) it is progress too that the main thread moves: it may compile, or read a large file.
        """
        seconds = min(seconds, 2 * TICK)  # a suspended process has not run meanwhile
        pulse, place, begun = self.pulse, self.place(), self.collectives()
        pulse.clock += seconds
        seen = (pulse.entered, begun, 0 if pulse.measured else place.mark)
        self._quiet = self._quiet + seconds if seen == self._seen else 0.0
        if pulse.activity not in (SAVING, WRITING):  # another thread begins them: they say nothing about this one
            begun = {group: number for group, number in begun.items() if not group.startswith(SAVES)}
        self._seen = seen
        self._number += 1
        return Beat(
            rank=self.rank,
            number=self._number,
            host=socket.gethostname(),
            pid=os.getpid(),
            born=born(os.getpid()),
            words=pulse.words,
            entered=pulse.entered,
            collectives=begun,
            quiet=self._quiet,
            allowed=pulse.allowed(self.limits),
            timeout=self.limits.timeout,
            first=max(self.limits.timeout, self.limits.first),
            at=place.at,
            reads=place.reads,
            waits=place.waits,
            over=over,
        )


def born(pid: int) -> str:
    """When a process began, in the kernel's clock ticks; empty where the system does not tell, or has no such process.

    See proc(5), /proc/pid/stat, field 22.
    """
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


def collectives_begun() -> dict[str, int]:
    """How many collectives this process has begun in each process group, as the group counts.

    The same group has the same key on all of its ranks. The key of the group of saves begins with `SAVES`.
    """
    module = sys.modules.get("torch.distributed.distributed_c10d")  # not imported here, beside the main thread
    world = getattr(module, "_world", None)
    if world is None:
        return {}
    found = {}
    for group, name in list(world.pg_names.items()):
        ranks = world.pg_group_ranks.get(group)
        try:
            number = group._get_sequence_number_for_group()
        except (RuntimeError, AttributeError):  # its backend does not count, or it is not a group of this rank
            continue
        if ranks and number >= 0:
            use = f"{SAVES} " if group.group_desc == SAVES else ""
            found[f"{use}{name}/{hash(tuple(sorted(ranks))):x}"] = int(number)
    return found


READING: set[CodeType] = set()
"""The code of functions that read micro batches: a main thread inside one waits for its loader."""
LIBRARIES = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib"))


def main_thread() -> Place:
    """Where the main thread of this process is."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    frames: list[FrameType] = []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    if not frames:
        return Place("an unknown place", 0, reads=False, waits=False)
    own = next((one for one in frames if not _of_library(one.f_code.co_filename)), frames[0])
    files = [one.f_code.co_filename for one in frames]
    line = linecache.getline(own.f_code.co_filename, own.f_lineno)
    return Place(
        f"{'/'.join(Path(own.f_code.co_filename).parts[-2:])}:{own.f_lineno} in {own.f_code.co_name}",
        hash(tuple((id(one.f_code), one.f_lasti) for one in frames)),
        reads=any(one.f_code in READING for one in frames),
        waits=any("/torch/distributed/" in file for file in files) or "wait(" in line,
    )


@functools.cache
def _of_library(file: str) -> bool:
    """Whether a file is Python's or torch's, whose lines say nothing about a run."""
    installed = "site-packages" in file
    return "/torch/" in file or file.startswith("<") or (file.startswith(LIBRARIES) and not installed)
