"""Finds what a plugin leaves behind when it is done: threads, child processes, open files, unclosed resources."""

import gc
import multiprocessing
import os
import threading
import warnings
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import resource_tracker
from pathlib import Path

from mplug_testing.suite import require

GRACE = 2.0
"""Seconds that a thread has to end after it was asked to."""


def nothing_left(by: str, use: Callable[[], object]) -> None:
    """Raise Fault if `use` leaves a thread, a child process, an open file or an unclosed resource behind.

    This calls `use` twice and checks the second call, because modules and files that a process loads once may stay.
    Garbage is collected before the check. `by` is the subject of the message: 'a loader'. Child processes and open
    files are found only on systems with /proc.
    """
    resource_tracker.ensure_running()  # Python's helper process, which stays once any code has started it
    _unclosed_by(use)
    threads, children, files = set(threading.enumerate()), _children(), _open_files()
    unclosed = _unclosed_by(use)
    require(not unclosed, f"{by} leaves resources unclosed: {', '.join(unclosed)}")
    for thread in set(threading.enumerate()) - threads:
        thread.join(GRACE)
        require(not thread.is_alive(), f"{by} leaves the thread '{thread.name}' running; end it when its work ends")
    started = [name for number, name in _children().items() if number not in children]
    require(not started, f"{by} leaves a child process running: {', '.join(started)}")
    still_open = [name for number, name in _open_files().items() if files.get(number) != name]
    require(not still_open, f"{by} leaves open: {', '.join(still_open)}")


def _unclosed_by(use: Callable[[], object]) -> list[str]:
    """The resources that were collected unclosed during a call and directly after it."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ResourceWarning)
        use()
        gc.collect()
    unclosed = [warning for warning in caught if issubclass(warning.category, ResourceWarning)]
    for other in (warning for warning in caught if warning not in unclosed):
        warnings.warn_explicit(other.message, other.category, other.filename, other.lineno)
    return [str(warning.message) for warning in unclosed]


def _children() -> dict[int, str]:
    """The running child processes of this process: number -> name."""
    found = {child.pid or 0: child.name for child in multiprocessing.active_children()}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # the process has just ended
            number, _, rest = path.read_text().partition(" (")
            name, _, fields = rest.rpartition(") ")
            state, parent = fields.split()[:2]
            if int(parent) == os.getpid() and state != "Z":
                found.setdefault(int(number), name)
    return found


def _open_files() -> dict[str, str]:
    """The files and sockets that this process has open: descriptor -> name."""
    found = {}
    for path in Path("/proc/self/fd").glob("*"):
        with suppress(OSError):  # the descriptor of /proc/self/fd itself, closed by now
            found[path.name] = str(path.readlink())
    looked_at, passed_over = ("/", "socket:"), ("/dev/", "/proc/")
    return {
        number: name
        for number, name in found.items()
        if name.startswith(looked_at) and not name.startswith(passed_over)
    }
