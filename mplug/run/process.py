"""The identity of a process, with which another process checks whether it still runs.

A process id alone is not sufficient: ids are reused, also after a restart of the machine, and containers on one machine
can have the same host name, each with ids of its own.
"""

import hashlib
import os
import socket
from dataclasses import dataclass
from functools import cache
from pathlib import Path

UNKNOWN = "unknown"
STATE, START = 0, 19
"""Fields of /proc/PID/stat after the name of the command (proc_pid_stat(5) counts them from 3)."""
DEAD = (b"Z", b"X", b"x")
"""States of processes that have ended; the parent of a zombie has not asked for its status yet."""


@dataclass(frozen=True)
class Process:
    """A process: where its id is valid, the id, and the time of its start in clock ticks since the machine started.

    `place` is a digest of the host name, the machine's current boot, and the namespaces of process ids and times.
    If the system does not provide them, it is `UNKNOWN`.
    """

    place: str
    pid: int
    start: int

    @classmethod
    def this(cls) -> "Process":
        """This process."""
        pid = os.getpid()
        found = _stat(pid)
        return cls(_place(), pid, int(found[START])) if found else cls(UNKNOWN, pid, 0)

    def runs(self) -> bool | None:
        """Whether it still runs; None if this process cannot know, as for a process in another place."""
        if self.place == UNKNOWN or self.place != _place():
            return None
        found = _stat(self.pid)
        if found is not None:
            return found[STATE] not in DEAD and int(found[START]) == self.start
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:  # another user's, hidden from this one: it may be another process of the same id
            return None
        return None


@cache
def _place() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        namespaces = [os.readlink("/proc/self/ns/pid")]
    except OSError:
        return UNKNOWN
    try:
        namespaces.append(os.readlink("/proc/self/ns/time"))
    except FileNotFoundError:
        namespaces.append("")  # a kernel before 5.6 has one time for all
    except OSError:
        return UNKNOWN
    text = "\n".join([socket.gethostname(), boot, *namespaces])
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:16]


def _stat(pid: int) -> list[bytes] | None:
    """The fields of /proc/PID/stat after the command's name; None if they cannot be read."""
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    return text[text.rfind(b")") + 1 :].split()
