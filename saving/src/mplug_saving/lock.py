"""The lock of a run's folder. Only one command can train in the folder, on all machines that share it.

    runs/first/.lock/held.PLACE.PID.START.TOKEN.BEAT    the baton: an empty file whose name identifies the holder
    runs/first/.lock/holder.TOKEN.json                  a description of the holder: host, process, user, command, since

The holder of the lock renames the baton every `BEAT` seconds: the number BEAT in its name counts up. A process that
takes over the lock also renames the baton. Each process renames the baton from the name that it read. Such a rename is
a compare-and-swap: if another process was faster, the old name no longer exists and the rename fails. No decision
depends on the clock of another machine, on time stamps of files, or on flock, which NFS and Lustre may apply to one
machine only. The lock requires a file system that renames files and folders atomically, as POSIX, NFS and Lustre do.

A process can take over the lock of a holder on the same host as soon as the holder's process has ended. It can take
over any other lock once the baton has not changed for `LEASE` seconds of its own monotonic clock. If the holder was
only paused, its next rename fails. `Claim.confirm` makes such a rename before each checkpoint becomes visible.

The most similar library, `filelock.SoftFileLease` (4.2), takes over a lock with renameat2(RENAME_EXCHANGE). NFS and
Lustre do not support that call, so the lock of a killed process would stay there for ever.
"""

import errno
import getpass
import json
import os
import re
import select
import shlex
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from textwrap import shorten
from types import FrameType
from typing import Any, Self

from mplug.errors import RunError, UsageError
from mplug_saving.process import Process

FOLDER = ".lock"
BEAT = 5.0
"""Seconds between two renames of the baton by its holder."""
LEASE = 45.0
"""Seconds without a rename of the baton after which a process of another machine may take over the lock."""
STUCK = 3.0
"""Maximum time in seconds for the main thread to handle SIGTERM."""
POLL = 0.5
"""Seconds between two reads of a baton that another process may still rename."""
TRIES = 200
"""Maximum number of attempts to read or change a lock that other processes change at the same time."""
NAME = re.compile(r"held\.([0-9a-z]+)\.([0-9]+)\.([0-9]+)\.([0-9a-f]+)\.([0-9]+)")


@dataclass(frozen=True)
class Baton:
    """The file whose name identifies the holder of the lock.

    `process` is None and `token` is empty if this version cannot parse the name.
    """

    name: str
    process: Process | None = None
    token: str = ""
    beat: int = 0

    @classmethod
    def of(cls, process: Process, token: str, beat: int) -> "Baton":
        """The baton of a holder after `beat` renames."""
        return cls(f"held.{process.place}.{process.pid}.{process.start}.{token}.{beat}", process, token, beat)

    @classmethod
    def read(cls, name: str) -> "Baton":
        """The baton with this file name."""
        match = NAME.fullmatch(name)
        if match is None:
            return cls(name)
        place, pid, start, token, beat = match.groups()
        return cls(name, Process(place, int(pid), int(start)), token, int(beat))

    def moved(self) -> "Baton":
        """The baton of the same holder after its next rename."""
        assert self.process is not None
        return Baton.of(self.process, self.token, self.beat + 1)


@dataclass
class Claim:
    """A lock that this command holds. The launcher passes a copy to the process of rank 0, and both may confirm it."""

    directory: Path
    baton: Baton
    confirmed: float = field(default=-LEASE, compare=False)
    """The last time at which the lock was confirmed, on the clock of this process."""
    failing: float | None = field(default=None, compare=False)
    """The time of the first failure of the file system in `keep`; None after a success."""

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "confirmed": -LEASE, "failing": None}  # the clock of another process may differ

    def confirm(self) -> None:
        """Rename the baton. RunError if another process has taken over the lock, or if the file system fails."""
        try:
            self._move()
        except OSError as error:
            raise RunError(f"cannot confirm the lock of the run '{self.directory}': {error}") from error

    def keep(self) -> None:
        """Confirm the lock, unless the last confirmation was at most `BEAT` seconds ago.

        A failure of the file system is an error only half a lease after the first failure. The lease is not counted
        from the last confirmation, because a long step may lie between the two.
        """
        if _clock() - self.confirmed <= BEAT:
            return
        began = _clock()
        try:
            self._move()
        except OSError as error:
            self.failing = began if self.failing is None else self.failing
            if _clock() - self.failing > LEASE / 2:
                raise RunError(f"cannot confirm the lock of the run '{self.directory}': {error}") from error

    def _move(self) -> None:
        folder, began = self.directory / FOLDER, _clock()
        for _ in range(TRIES):
            previous = self.baton
            following = previous.moved()
            try:
                _rename(folder, previous, following)
                self.baton, self.confirmed, self.failing = following, began, None
                return
            except FileNotFoundError:  # the other process with a copy of this claim has renamed it, or another holder
                current = _baton_in(folder)
            if current is None and folder.is_dir():
                time.sleep(0.01)  # listing a folder during a rename may return neither name
            elif current is None or current.token != previous.token:
                break
            else:
                self.baton = current
        raise RunError(self._lost(current))

    def held(self) -> bool:
        """Whether this command still holds the lock."""
        try:
            self.confirm()
        except RunError:
            return False
        return True

    def release(self) -> None:
        """Release the lock, and remove the folder of a run that has not started. Does nothing if the lock is lost."""
        folder = self.directory / FOLDER
        if not self.held():
            return
        with suppress(OSError):  # other processes can take over a lock that is left
            _remove_but(folder, self.baton.name)
            (folder / self.baton.name).unlink()
            folder.rmdir()
            self.directory.rmdir()  # fails if the run has started, because the folder has files

    def _lost(self, current: Baton | None) -> str:
        if current is None:
            reason = "perhaps its folder was moved or removed"
            return f"the lock of the run '{self.directory}' no longer exists ({reason}); nothing more is saved"
        return (
            f"another process took over the run '{self.directory}', because this process did not renew its lock for "
            f"{LEASE:.0f} s: {_holder(self.directory, current)} holds it now; nothing more is saved"
        )


def take(directory: Path, notify: Callable[[str], None]) -> Claim:
    """Create the run's folder if needed, and take its lock. UsageError if another process holds the lock.

    The function calls `notify` with a message if it must wait to see whether a holder on another machine still renames
    its baton.
    """
    folder = directory / FOLDER
    own = Baton.of(Process.this(), os.urandom(8).hex(), 0)
    watched, since = None, 0.0
    for _ in range(int(TRIES + LEASE / POLL)):
        baton = _baton_in(folder)
        if baton is None:
            if _install(directory, own):
                break
            continue
        runs = baton.process.runs() if baton.process is not None else None
        if runs is None and (watched is None or watched.token != baton.token):
            watched, since = baton, _clock()
            notify(f"{_held_by(directory, baton)}; waiting up to {LEASE:.0f} s to see whether it still runs")
        if runs or (runs is None and watched is not None and watched.name != baton.name):
            raise UsageError(f"{_held_by(directory, baton)}; wait until it ends, stop it, or use another --name")
        if runs is None and _clock() - since < LEASE:
            time.sleep(POLL)
        elif _take_over(folder, baton, own):
            break
    else:
        raise RunError(f"cannot take the lock '{folder}', because other processes keep changing it; try again")
    claim = Claim(directory, own, _clock())
    _tidy(directory, own)
    return claim


def is_held(directory: Path) -> bool:
    """Whether a process trains in a run's folder now, without waiting.

    For a process of another machine or container, the function compares the time of the last rename with the clock of
    this machine. The answer is for display only: `take` decides without clocks.
    """
    folder = directory / FOLDER
    baton = _baton_in(folder)
    runs = baton.process.runs() if baton is not None and baton.process is not None else None
    if baton is None or runs is not None:
        return bool(runs)
    try:
        return abs(time.time() - folder.stat().st_mtime) < LEASE
    except FileNotFoundError:
        return False


class Lock:
    """A context manager that can hold the lock of one run. A thread renews the lock; SIGTERM releases it."""

    claim: Claim | None = None
    _leaving = False

    def __init__(self, notify: Callable[[str], None]) -> None:
        self.notify = notify
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True, name="lock")
        self._restore: list[Callable[[], object]] = []

    def take(self, directory: Path) -> Claim:
        """Take the lock of a run's folder; UsageError if another process holds it."""
        self.claim = take(directory, self.notify)
        self._handle_sigterm()
        self._thread.start()
        return self.claim

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.claim is None:
            return
        if signal.getsignal(signal.SIGTERM) == self._leave:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the block ends already; nothing may interrupt the release
        self._ended.set()
        os.write(self._wake, b"\0")
        self._thread.join()
        self.claim.release()
        for restore in self._restore:
            restore()

    def _handle_sigterm(self) -> None:
        """Make SIGTERM raise SystemExit in the main thread, and wake the lock's thread in case that thread is stuck."""
        self._signals, self._wake = os.pipe()
        os.set_blocking(self._wake, False)
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._leave)
            before = signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
            self._restore = [
                lambda: signal.set_wakeup_fd(before),
                lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL),
            ]
        self._restore += [lambda: os.close(self._signals), lambda: os.close(self._wake)]

    def _leave(self, number: int, frame: FrameType | None) -> None:
        """End this process by an exception, which releases the lock. A second SIGTERM ends the process at once."""
        self._leaving = True
        signal.signal(number, signal.SIG_DFL)
        raise SystemExit(128 + number)

    def _beat(self) -> None:
        assert self.claim is not None
        while not self._ended.is_set():
            waiting, _, _ = select.select([self._signals], [], [], BEAT)
            if waiting and signal.SIGTERM in os.read(self._signals, 512):
                self._end_if_stuck()
            elif not waiting:
                self.claim.held()  # if the lock is lost, the training process finds out before it writes

    def _end_if_stuck(self) -> None:
        """End the process if the main thread cannot run `_leave`, because it waits in a C function."""
        assert self.claim is not None
        if signal.getsignal(signal.SIGTERM) == self._leave and not self._ended.wait(STUCK) and not self._leaving:
            self.claim.release()
            os._exit(128 + signal.SIGTERM)


def _clock() -> float:
    """A monotonic clock in seconds, which includes time in suspend if the system has such a clock."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


# Files of the lock.


def _baton_in(folder: Path) -> Baton | None:
    """The baton; None if the lock is free."""
    try:
        names = [name for name in os.listdir(folder) if name.startswith("held.")]
    except FileNotFoundError:
        return None
    return Baton.read(names[0]) if names else None


def _rename(folder: Path, previous: Baton, following: Baton) -> None:
    """The compare-and-swap. FileNotFoundError if the baton does not have the name `previous`."""
    try:
        os.rename(folder / previous.name, folder / following.name)
    except FileNotFoundError:
        if not (folder / following.name).exists():  # NFS may rename, lose the reply, and fail in its second attempt
            raise


def _take_over(folder: Path, baton: Baton, own: Baton) -> bool:
    """Take over a baton. False if another process was faster, or if the holder has renamed it meanwhile."""
    try:
        _rename(folder, baton, own)
    except FileNotFoundError:
        return False
    return True


def _install(directory: Path, own: Baton) -> bool:
    """Create the lock's folder with the baton in it, by one rename. False if another process was faster."""
    folder, temporary = directory / FOLDER, directory / f"{FOLDER}.{own.token}"
    try:
        temporary.mkdir(parents=True)
        (temporary / own.name).touch()
        with suppress(OSError):  # another process holds the lock by now, or there is no folder
            _remove_but(folder, "")
            folder.rmdir()
        temporary.rename(folder)
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOENT):  # ENOENT: the faster process removed it
            raise
        shutil.rmtree(temporary, ignore_errors=True)
        return (folder / own.name).exists()
    return True


def _tidy(directory: Path, own: Baton) -> None:
    """Write the description of the holder. Remove files of earlier holders, and folders of slower processes."""
    folder = directory / FOLDER
    _remove_but(folder, own.name)
    for temporary in directory.glob(f"{FOLDER}.*"):
        shutil.rmtree(temporary, ignore_errors=True)
    description = {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "user": _user(),
        "command": shorten(shlex.join(["mplug", *sys.argv[1:]]), 120, placeholder=" ..."),
        "since": datetime.now().astimezone().isoformat(sep=" ", timespec="seconds"),
    }
    (folder / f"holder.{own.token}.json").write_text(json.dumps(description) + "\n", encoding="utf-8")


def _remove_but(folder: Path, baton: str) -> None:
    """Remove the descriptions of holders. A baton stays: only a rename or its own holder may remove it."""
    for name in os.listdir(folder):
        if name != baton and not name.startswith("held."):
            (folder / name).unlink(missing_ok=True)


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # the user has no name, as in some containers
        return f"user {os.getuid()}"


# Text for messages.


def _held_by(directory: Path, baton: Baton) -> str:
    return f"the run '{directory}' is held by {_holder(directory, baton)}"


def _holder(directory: Path, baton: Baton) -> str:
    """The holder for a message: its process, machine, user and command, as far as they are known."""
    try:
        path = directory / FOLDER / f"holder.{baton.token}.json"
        holder = json.loads(path.read_text(encoding="utf-8"))
        command = f"{holder['user']}: {holder['command']}"
        return f"process {holder['pid']} on {holder['host']} ({command}), since {holder['since']}"
    except (OSError, ValueError, KeyError, TypeError):  # the holder has not written the description yet
        return f"process {baton.process.pid}" if baton.process is not None else f"'{baton.name}'"
