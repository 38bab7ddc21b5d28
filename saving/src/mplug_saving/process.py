"""The identity of a process. Another process uses it to check whether the process still runs.

A process id alone is not sufficient. The system reuses ids, also after a restart of the machine. Containers on one
machine can have the same host name, and each has its own ids.
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
"""States of processes that have ended. The parent of a zombie has not read its exit status yet."""


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
        fields = _stat(pid)
        return cls(_place(), pid, int(fields[START])) if fields else cls(UNKNOWN, pid, 0)

    def runs(self) -> bool | None:
        """Whether the process still runs. None if this process cannot know it, as for a process in another place."""
        if self.place == UNKNOWN or self.place != _place():
            return None
        fields = _stat(self.pid)
        if fields is not None:
            return fields[STATE] not in DEAD and int(fields[START]) == self.start
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:  # the process belongs to another user and may be a new one with the same id
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
        namespaces.append("")  # kernels before 5.6 have no time namespaces
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
