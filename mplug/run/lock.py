"""The lock of a run's folder: one command at a time trains in it, among all machines that see the folder.

    runs/first/.lock/held.PLACE.PID.START.TOKEN.BEAT    the baton: an empty file whose name says who holds the lock
    runs/first/.lock/holder.TOKEN.json                  the holder in words: host, process, user, command, since

A holder renames the baton every `BEAT` seconds (BEAT in its name counts up). A process that takes the lock over renames
it, too. Each rename is from the name that the process has seen, so it is a compare-and-swap: if another process was
faster, the old name is gone and the rename fails. No decision depends on the clock of another machine, on time stamps
of files, or on flock, which NFS and Lustre may keep local to a machine. What the lock needs is that the file system
renames files and folders atomically, as POSIX demands and NFS and Lustre do.

A holder on the same host whose process has ended loses the lock at once. Any other holder loses it once its baton has
not moved for `LEASE` seconds of the observer's own monotonic clock. A holder that was only paused finds out at its next
rename, which `Claim.confirm` makes before each save becomes visible.

`filelock.SoftFileLease` (4.2), the nearest library, exchanges two names by renameat2(RENAME_EXCHANGE) to take a lock
over. NFS and Lustre refuse that call, so on them the lock of a killed process would stay for ever.
"""

import errno
import getpass
import json
import os
import re
import secrets
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
from mplug.run.process import Process

FOLDER = ".lock"
BEAT = 5.0
"""Seconds between two renames of the baton by its holder."""
LEASE = 45.0
"""Seconds for which a baton must not move until a process of another machine may take it."""
STUCK = 3.0
"""Seconds that the main thread has to hear a signal."""
POLL = 0.5
TRIES = 200
"""How often the state of a lock may change under a process that looks at it, before the process gives up."""
NAME = re.compile(r"held\.([0-9a-z]+)\.([0-9]+)\.([0-9]+)\.([0-9a-f]+)\.([0-9]+)")


@dataclass(frozen=True)
class Baton:
    """The file whose name says who holds the lock; one that this version cannot read has no process and no token."""

    name: str
    process: Process | None = None
    token: str = ""
    beat: int = 0

    @classmethod
    def of(cls, process: Process, token: str, beat: int) -> "Baton":
        """The baton of a holder after so many beats."""
        return cls(f"held.{process.place}.{process.pid}.{process.start}.{token}.{beat}", process, token, beat)

    @classmethod
    def read(cls, name: str) -> "Baton":
        """From the name of the file."""
        found = NAME.fullmatch(name)
        if found is None:
            return cls(name)
        place, pid, start, token, beat = found.groups()
        return cls(name, Process(place, int(pid), int(start)), token, int(beat))

    def moved(self) -> "Baton":
        """The same holder's, one beat later."""
        assert self.process is not None
        return Baton.of(self.process, self.token, self.beat + 1)


@dataclass
class Claim:
    """A held lock: plain data, which the launcher hands to the process of rank 0; both may confirm it."""

    directory: Path
    baton: Baton
    confirmed: float = field(default=-LEASE, compare=False)
    """When the lock was last known to be held, on this process's clock."""
    failing: float | None = field(default=None, compare=False)
    """When the file system first did not answer `keep`; None if it has answered since."""

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "confirmed": -LEASE, "failing": None}  # another process may have another clock

    def confirm(self) -> None:
        """Move the baton; RunError if another process has taken the lock over, or the file system does not answer."""
        try:
            self._move()
        except OSError as error:
            raise RunError(f"cannot confirm the lock of the run '{self.directory}': {error}") from error

    def keep(self) -> None:
        """Confirm, unless that was done a short time ago: no other process can have taken the lock since.

        A file system that does not answer is no error for half of the lease, from its first failure on: the time
        before that may be a long step.
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
            seen = self.baton
            moved = seen.moved()
            try:
                _rename(folder, seen, moved)
                self.baton, self.confirmed, self.failing = moved, began, None
                return
            except FileNotFoundError:  # moved by the other process that confirms, or by another holder
                found = _baton_in(folder)
            if found is None and folder.is_dir():
                time.sleep(0.01)  # a list that is read during a rename may have neither name
            elif found is None or found.token != seen.token:
                break
            else:
                self.baton = found
        raise RunError(self._lost(found))

    def held(self) -> bool:
        """Whether the lock is still held."""
        try:
            self.confirm()
        except RunError:
            return False
        return True

    def release(self) -> None:
        """Let others have the lock; the folder of a run that has not begun goes, too. Not an error if it is lost."""
        folder = self.directory / FOLDER
        if not self.held():
            return
        with suppress(OSError):  # what is left is a lock that others can take over
            _remove_but(folder, self.baton.name)
            (folder / self.baton.name).unlink()
            folder.rmdir()
            self.directory.rmdir()  # fails if the run has begun

    def _lost(self, found: Baton | None) -> str:
        if found is None:
            moved = "as if its folder was moved or removed"
            return f"the lock of the run '{self.directory}' is gone, {moved}; nothing more is saved"
        return (
            f"the run '{self.directory}' was taken over, because this process gave no sign of life for {LEASE:.0f} s: "
            f"{_named(self.directory, found)} holds it now; nothing more is saved"
        )


def take(directory: Path, tell: Callable[[str], None]) -> Claim:
    """Take the lock of a run's folder, which is made; UsageError if another process holds it.

    `tell` gets a sentence if this process has to wait for a sign of life of a holder on another machine.
    """
    folder = directory / FOLDER
    own = Baton.of(Process.this(), secrets.token_hex(8), 0)
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
            tell(f"{_held_by(directory, baton)}; waiting up to {LEASE:.0f} s for a sign of life of it")
        if runs or (runs is None and watched is not None and watched.name != baton.name):
            raise UsageError(f"{_held_by(directory, baton)}; wait until it ends, stop it, or use another --name")
        if runs is None and _clock() - since < LEASE:
            time.sleep(POLL)
        elif _take_over(folder, baton, own):
            break
    else:
        raise RunError(f"the lock '{folder}' changes hands all the time, or cannot be read; try again")
    claim = Claim(directory, own, _clock())
    _tidy(directory, own)
    return claim


class Lock:
    """Holds the lock of at most one run for a block, and keeps it by a thread. SIGTERM in the block releases it."""

    claim: Claim | None = None
    _heard = False

    def __init__(self, tell: Callable[[str], None]) -> None:
        self.tell = tell
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True, name="lock")
        self._restore: list[Callable[[], object]] = []

    def take(self, directory: Path) -> Claim:
        """Take the lock of a run's folder; UsageError if another process holds it."""
        self.claim = take(directory, self.tell)
        self._hear_sigterm()
        self._thread.start()
        return self.claim

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.claim is None:
            return
        if signal.getsignal(signal.SIGTERM) == self._leave:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the block ends anyway, and releasing takes a moment
        self._over.set()
        os.write(self._wake, b"\0")
        self._thread.join()
        self.claim.release()
        for restore in self._restore:
            restore()

    def _hear_sigterm(self) -> None:
        """End by an exception instead of at once; a C function that does not return must not keep it from happening."""
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
        """End this process, so that what it holds is released; asked once more, it ends at once."""
        self._heard = True
        signal.signal(number, signal.SIG_DFL)
        raise SystemExit(128 + number)

    def _beat(self) -> None:
        assert self.claim is not None
        while not self._over.is_set():
            waiting, _, _ = select.select([self._signals], [], [], BEAT)
            if waiting and signal.SIGTERM in os.read(self._signals, 512):
                self._end_if_stuck()
            elif not waiting:
                self.claim.held()  # if it is lost, the process that trains finds out by itself, before it writes

    def _end_if_stuck(self) -> None:
        """The main thread does not run `_leave` while it waits in C, as for processes that never come."""
        assert self.claim is not None
        if signal.getsignal(signal.SIGTERM) == self._leave and not self._over.wait(STUCK) and not self._heard:
            self.claim.release()
            os._exit(128 + signal.SIGTERM)


def _clock() -> float:
    """Seconds that go on while the machine sleeps, where it has such a clock."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


# The folder of the lock.


def _baton_in(folder: Path) -> Baton | None:
    """The baton; None if the lock is free."""
    try:
        names = [name for name in os.listdir(folder) if name.startswith("held.")]
    except FileNotFoundError:
        return None
    return Baton.read(names[0]) if names else None


def _rename(folder: Path, seen: Baton, wanted: Baton) -> None:
    """The compare-and-swap; FileNotFoundError if the baton has another name."""
    try:
        os.rename(folder / seen.name, folder / wanted.name)
    except FileNotFoundError:
        if not (folder / wanted.name).exists():  # NFS may do it, lose its answer, and fail to do it again
            raise


def _take_over(folder: Path, baton: Baton, own: Baton) -> bool:
    """Take a baton whose holder has ended; False if another process was faster, or the holder lives after all."""
    try:
        _rename(folder, baton, own)
    except FileNotFoundError:
        return False
    return True


def _install(directory: Path, own: Baton) -> bool:
    """Make the lock's folder with the baton in it, by one rename; False if another process was faster."""
    folder, aside = directory / FOLDER, directory / f"{FOLDER}.{own.token}"
    try:
        aside.mkdir(parents=True)
        (aside / own.name).touch()
        with suppress(OSError):  # held by now, or not there
            _remove_but(folder, "")
            folder.rmdir()
        aside.rename(folder)
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOENT):  # ENOENT: swept by the faster one
            raise
        shutil.rmtree(aside, ignore_errors=True)
        return (folder / own.name).exists()
    return True


def _tidy(directory: Path, own: Baton) -> None:
    """Say who holds the lock, and remove what other holders and competitors have left."""
    folder = directory / FOLDER
    _remove_but(folder, own.name)
    for aside in directory.glob(f"{FOLDER}.*"):
        shutil.rmtree(aside, ignore_errors=True)
    described = {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "user": _user(),
        "command": shorten(shlex.join(["mplug", *sys.argv[1:]]), 120, placeholder=" ..."),
        "since": datetime.now().astimezone().isoformat(sep=" ", timespec="seconds"),
    }
    (folder / f"holder.{own.token}.json").write_text(json.dumps(described) + "\n", encoding="utf-8")


def _remove_but(folder: Path, baton: str) -> None:
    """Remove the descriptions of holders. A baton goes only by a rename, or with its holder."""
    for name in os.listdir(folder):
        if name != baton and not name.startswith("held."):
            (folder / name).unlink(missing_ok=True)


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container that has no name for the user
        return f"user {os.getuid()}"


# Words.


def _held_by(directory: Path, baton: Baton) -> str:
    return f"the run '{directory}' is held by {_named(directory, baton)}"


def _named(directory: Path, baton: Baton) -> str:
    """The holder as the user can find it."""
    try:
        path = directory / FOLDER / f"holder.{baton.token}.json"
        found = json.loads(path.read_text(encoding="utf-8"))
        who = f"{found['user']}: {found['command']}"
        return f"process {found['pid']} on {found['host']} ({who}), since {found['since']}"
    except (OSError, ValueError, KeyError, TypeError):  # it took the lock a moment ago
        return f"process {baton.process.pid}" if baton.process is not None else f"'{baton.name}'"
