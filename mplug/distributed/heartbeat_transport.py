"""Heartbeats on their way: through the launcher's pipe, or, where another launcher started the processes, a store.

With `mplug train --parallel dp4` the launcher hears the heartbeats of all processes (mplug.distributed.launch). With
torchrun, srun or mpirun every process writes its heartbeat into the TCP store through which the processes met. Rank 0
reads all of them and decides. The other ranks read rank 0's heartbeat and its decision, so a second costs the store a
few messages a rank. A process whose store does not answer knows that rank 0's machine is gone.
"""

import json
import logging
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

from mplug.distributed.heartbeats import TICK, Beat, Heart, born
from mplug.distributed.watchdog import LATE, Heard, Verdict, Ward
from mplug.errors import RunError, UsageError

log = logging.getLogger("mplug")
PER_SECOND = 256
"""Heartbeats that the store takes in a second; with more ranks, each exchanges its own less often."""
READERS = 256
"""With more ranks, a rank whose connection breaks does not read all heartbeats to find the lost rank."""
BROKEN = "ending with a RuntimeError"
"""What a rank does whose connection to a lost rank broke: it is not the lost rank."""
SAY = 2.0
"""Seconds that a process has to write into its log why it ends: the disk may hang too."""


class Spoken:
    """A process's end of the launcher's pipe, for all of its threads."""

    def __init__(self, line: Connection) -> None:
        self._line, self._lock = line, threading.RLock()  # a signal may interrupt the main thread while it sends

    def send(self, word: object) -> None:
        """Send a word; drop a heartbeat while the launcher, which may be suspended, does not read."""
        with self._lock:
            if not isinstance(word, Beat) or select.select([], [self._line], [], 0)[1]:
                self._line.send(word)

    def recv(self) -> Any:
        """Wait for the launcher's next word."""
        return self._line.recv()


class Ticks:
    """Calls a function about once a second on a daemon thread, with the seconds since the last call, for a block."""

    def __init__(self, call: Callable[[float], None]) -> None:
        self._call, self._ended = call, threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="mplug heartbeat")

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join(2 * TICK)

    def _run(self) -> None:
        last = time.monotonic()
        while True:
            now = time.monotonic()
            self._call(now - last)
            last = now
            if self._ended.wait(TICK):
                return


@contextmanager
def beating_to(tell: Callable[[Beat], None] | None, heart: Heart | None) -> Iterator[None]:
    """Send a heartbeat a second through the launcher's pipe for a block, and a last one at its end."""
    if tell is None or heart is None:
        yield
        return

    def send(seconds: float, over: bool = False) -> None:
        with suppress(OSError):  # the launcher has hung up, and another thread ends this process
            tell(heart.beat(seconds, over))

    with Ticks(send):
        yield
    send(0.0, over=True)  # an error goes through the pipe itself


@contextmanager
def watching(heart: Heart | None, size: int, attempt: str) -> Iterator[None]:
    """Exchange heartbeats through the store for a block, and end this process when the run cannot go on.

    `attempt` distinguishes this attempt of this job from others. The processes have met: MASTER_ADDR and MASTER_PORT
    are those of the store. An error that is a broken connection becomes a RunError that names the rank which is gone.
    """
    if heart is None:
        yield
        return
    exchange = Exchange(heart, size, attempt)
    with exchange.running():
        try:
            yield
        except (UsageError, RunError) as error:
            heart.pulse.enter(f"ending with '{error}'")
            raise
        except Exception as error:
            broken = isinstance(error, RuntimeError)
            heart.pulse.enter(BROKEN if broken else f"ending with {type(error).__name__}: {error}")
            gone = exchange.gone() if broken else None
            if gone is None:
                raise
            raise RunError(gone) from error


class Exchange:
    """The exchange of heartbeats with the other ranks through the store.

    One thread beats and counts how long the store has not answered. Another talks to the store, where it may hang.
    """

    def __init__(self, heart: Heart, size: int, attempt: str) -> None:
        self.heart, self.size = heart, size
        self.address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        self.prefix = f"mplug/{attempt}"
        self.interval = max(TICK, size / PER_SECOND)
        watched = [rank for rank in range(size) if rank != heart.rank] if heart.rank == 0 else [0]
        self.ward = Ward(watched, longest=2 * self.interval, late=max(LATE, 3 * self.interval))
        self.first: Beat | None = None
        """The last heartbeat of rank 0 that was heard."""
        self._latest = heart.beat(0.0)
        self._unanswered = self._suspended = 0.0
        self._over = threading.Event()
        self._lock = threading.Lock()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Exchange heartbeats for a block."""
        thread = threading.Thread(target=self._talk, daemon=True, name="mplug store")
        thread.start()
        with Ticks(self._tick):
            try:
                yield
            except BaseException:
                self._latest = self.heart.beat(0.0)
                raise
            else:
                self._latest = self.heart.beat(0.0, over=True)
            finally:
                self._over.set()
                thread.join(2 * self.interval)

    def gone(self) -> str | None:
        """After a broken connection: which rank has sent no heartbeat for a few seconds, in a sentence."""
        if self.size > READERS:
            return None
        try:
            store = self._connected(seconds=5)
            before = self._read(store, range(self.size))
            time.sleep(3 * self.interval)
            after = self._read(store, range(self.size))
        except RuntimeError:
            return (
                f"{self._rank_zero()} has ended, or its machine is down or unreachable: "
                f"the store {self.address} does not answer"
            )
        lost = [beat for rank, beat in after.items() if before.get(rank) == beat and not beat.over]
        lost = [beat for beat in lost if not beat.words.startswith(BROKEN)] or lost
        names = " and ".join(f"rank {beat.rank} on {beat.host}, last heard {beat.words}," for beat in lost)
        return f"{names} died or is unreachable, and the connection to it broke" if lost else None

    # The thread that beats.

    def _tick(self, seconds: float) -> None:
        if self._over.is_set():
            return
        self._latest = self.heart.beat(seconds)
        self._suspended = max(self._suspended, seconds)
        self._unanswered += min(seconds, 2 * TICK)
        timeout = self.heart.limits.timeout
        if self._unanswered > timeout + self.interval:
            self._end(self._without_store(), (self.first,) if self.first else ())

    def _without_store(self) -> str:
        return (
            f"{self._rank_zero()} stopped answering {self._unanswered:.0f} s ago: it is suspended, or its machine, "
            f"which holds the store {self.address}, is down or unreachable "
            f"(watchdog.timeout is {self.heart.limits.timeout:g} s)"
        )

    def _rank_zero(self) -> str:
        return f"rank 0 on {self.first.host}, last heard {self.first.words}," if self.first else "rank 0"

    # The thread that talks to the store.

    def _talk(self) -> None:
        """Exchange heartbeats until the block ends; connect again after an error, while the other thread counts on."""
        while True:
            try:
                self._exchange_all(self._connected())
                return
            except RuntimeError as error:
                log.info("the connection to the store %s broke: %s", self.address, error)
            if self._suspended > self.heart.limits.timeout and not self._over.is_set():
                self._end(
                    f"this process was suspended for {self._suspended:.0f} s, and the run has ended meanwhile", ()
                )
            if self._over.wait(self.interval):
                return

    def _exchange_all(self, store: Any) -> None:
        last = time.monotonic()
        while True:
            over = self._over.is_set()
            self._exchange(store)
            now = time.monotonic()
            self._unanswered = self._suspended = 0.0
            self.ward.pass_time(now - last)
            last = now
            self._judge(store)
            if over:
                return
            self._over.wait(self.interval)

    def _connected(self, seconds: float = 60) -> Any:
        """A connection of this thread's own: calls of one connection wait for each other."""
        from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

        host, _, port = self.address.rpartition(":")
        store = TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=timedelta(seconds=seconds))
        return PrefixStore(self.prefix, store)

    def _exchange(self, store: Any) -> None:
        store.set(f"beat/{self.heart.rank}", json.dumps(asdict(self._latest)))
        for rank, beat in self._read(store, self.ward.heard).items():
            self.ward.hear(beat)
            if rank == 0:
                self.first = beat

    def _read(self, store: Any, ranks: Collection[int]) -> dict[int, Beat]:
        """The last heartbeats of ranks; a rank that has sent none yet is left out."""
        keys = {f"beat/{rank}": rank for rank in ranks}
        known = list(keys) if keys and store.check(list(keys)) else [key for key in keys if store.check([key])]
        texts = store.multi_get(known) if known else []
        return {keys[key]: Beat(**json.loads(text)) for key, text in zip(known, texts, strict=True)}

    def _judge(self, store: Any) -> None:
        if self.heart.rank != 0:
            if store.check(["verdict"]):
                said = json.loads(store.get("verdict"))
                self._end(said["sentence"], [Beat(**beat) for beat in said["beats"]])
            found = self.ward.silence()
        else:
            found = self._verdict()
            if found is not None:
                beats = [asdict(beat) for beat in found.beats]
                store.set("verdict", json.dumps({"sentence": found.text, "beats": beats}))
                time.sleep(3 * self.interval)  # the others read it before this process, and perhaps the store, ends
        if found is not None:
            self._end(found.text, found.beats)

    def _verdict(self) -> Verdict | None:
        """Rank 0 judges itself as it judges the others."""
        everyone = Ward([], late=self.ward.late)
        everyone.heard = dict(self.ward.heard)
        everyone.heard[0] = Heard(self._latest)
        return everyone.verdict()

    def _end(self, text: str, named: Collection[Beat]) -> None:
        """End this process with a sentence and status 1: its main thread may wait in a collective for ever."""
        with self._lock:
            if self._over.is_set():  # the run has ended by itself
                return
            os.write(2, f"mplug: {text}\n".encode())
            for beat in named:
                kill_if_here(beat)
            writing = threading.Thread(target=log.error, args=("the run ends: %s", text), daemon=True)
            writing.start()
            writing.join(SAY)
            os._exit(1)


def kill_if_here(beat: Beat) -> None:
    """Kill a process that the others waited for, if it is on this machine, so that it never wakes up and writes."""
    here = beat.host == socket.gethostname() and beat.pid != os.getpid()
    if here and beat.born and born(beat.pid) == beat.born:
        with suppress(OSError):
            os.kill(beat.pid, signal.SIGKILL)
