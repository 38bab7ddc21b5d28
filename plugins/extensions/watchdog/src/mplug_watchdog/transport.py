"""Transport of heartbeats: through the pipe of mplug's launcher, or through a store under another launcher.

- `mplug train --parallel dp4` starts the processes itself. They send their heartbeats through the launcher's pipes, and
  the monitor in the launcher decides.
- Under torchrun, srun or mpirun, each process writes its heartbeats to the TCP store through which the processes met.
  Rank 0 reads all of them and decides. The other ranks read only rank 0's heartbeat and its decision, so the store
  handles a few messages per rank and second. A process whose store does not answer concludes that rank 0's machine is
  down.
"""

import json
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from datetime import timedelta
from typing import Any

from mplug import RunError, Send, UsageError
from mplug_launch import Hang, PluginMessage
from mplug_watchdog.clocks import Clocks
from mplug_watchdog.heartbeats import TICK, Beat, Heartbeats, born, has_ended, process_of
from mplug_watchdog.listener import LATE, LastBeat, Listener, Verdict

log = logging.getLogger("mplug")
PER_SECOND = 256
"""Maximum number of heartbeats per second in the store; with more ranks, each rank sends its own less often."""
READERS = 256
"""Maximum number of ranks with which a rank whose connection breaks reads all heartbeats to find the lost rank."""
BROKEN = "a RuntimeError"
"""The reason why a rank ends whose connection to a lost rank broke; such a rank is not the lost one."""
ENDING = "ending with "
"""How the phrase of a rank begins that ends (`Durations.begin_ending`)."""
LOG_SECONDS = 2.0
"""Seconds in which a process writes the reason of its end to its log; the disk may hang too."""


class Ticks:
    """Calls a function about once a second during a block, on a daemon thread; it receives the elapsed seconds."""

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
def reporting(heartbeats: Heartbeats, send: Send) -> Iterator[None]:
    """Send one heartbeat per second through the launcher's pipe during a block, and a last one at its end."""

    def beat(seconds: float, over: bool = False) -> None:
        with suppress(OSError):  # the launcher has closed the pipe, and another thread ends this process
            send(PluginMessage(heartbeats.next(seconds, over)))

    with Ticks(beat):
        yield
    beat(0.0, over=True)  # not after an error, which the process itself sends through the pipe


class LauncherMonitor(Listener):
    """The listener in a launcher, which also says which clocks jump."""

    def __init__(self, ranks: Iterable[int]) -> None:
        super().__init__(ranks)
        self.clocks = Clocks()

    def hear(self, rank: int, content: Beat) -> None:
        """Store a heartbeat."""
        super().hear(rank, content)
        self.clocks.hear(content)

    def hang(self, seconds: float) -> Hang | None:
        """The processes that hang, `seconds` after the last call, or None."""
        say_each(self.clocks.sentences(seconds))
        return super().hang(seconds)


def say_each(sentences: Iterable[str]) -> None:
    """Print sentences that end nothing."""
    for text in sentences:
        log.warning("%s", text)
        os.write(2, f"mplug: {text}\n".encode())


@contextmanager
def exchanging(heartbeats: Heartbeats, size: int, attempt: str) -> Iterator[None]:
    """Exchange heartbeats through the store during a block, and end this process when the run cannot continue.

    `attempt` distinguishes this attempt of this job from others. Enter the block after the processes have met, when
    MASTER_ADDR and MASTER_PORT are those of the store. If a broken connection raises an error in the block, the error
    becomes a RunError that names the lost rank.
    """
    exchange, durations = Exchange(heartbeats, size, attempt), heartbeats.durations
    with exchange.running():
        try:
            yield
        except (UsageError, RunError) as error:
            durations.begin_ending(f"'{error}'")
            raise
        except Exception as error:
            broken = isinstance(error, RuntimeError)
            durations.begin_ending(BROKEN if broken else f"{type(error).__name__}: {error}")
            sentence = exchange.lost_rank() if broken else None
            if sentence is None:
                raise
            raise RunError(sentence) from error


class Exchange:
    """The exchange of heartbeats with the other ranks through the store.

    One thread makes heartbeats and counts the seconds since the store answered. Another thread uses the store, where it
    may hang.
    """

    def __init__(self, heartbeats: Heartbeats, size: int, attempt: str) -> None:
        self.heartbeats, self.size = heartbeats, size
        self.address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        self.prefix = f"mplug/{attempt}"
        self.interval = max(TICK, size / PER_SECOND)
        watched = [rank for rank in range(size) if rank != heartbeats.rank] if heartbeats.rank == 0 else [0]
        self.listener = Listener(watched, longest=2 * self.interval, late=max(LATE, 3 * self.interval))
        self.clocks = Clocks()
        self.first: Beat | None = None
        """The last heartbeat that this process has read of rank 0."""
        self._latest = heartbeats.next(0.0)
        self._unanswered = self._suspended = 0.0
        self._over = threading.Event()
        self._lock = threading.Lock()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Exchange heartbeats during a block."""
        thread = threading.Thread(target=self._exchange_until_over, daemon=True, name="mplug store")
        thread.start()
        with Ticks(self._tick):
            try:
                yield
            except BaseException:
                self._latest = self.heartbeats.next(0.0)
                raise
            else:
                self._latest = self.heartbeats.next(0.0, over=True)
            finally:
                self._over.set()
                thread.join(2 * self.interval)

    def lost_rank(self) -> str | None:
        """After a broken connection: a sentence that names the ranks without a heartbeat for a few seconds, or None."""
        if self.size > READERS:
            return None
        if refuses(self.address):
            return self._without_store()
        try:
            store = self._connected(seconds=5)
            before = self._read(store, range(self.size))
            time.sleep(3 * self.interval)
            after = self._read(store, range(self.size))
        except RuntimeError:
            return self._without_store()
        lost = [beat for rank, beat in after.items() if before.get(rank) == beat and not beat.over]
        lost = [beat for beat in lost if not beat.phrase.startswith(f"{ENDING}{BROKEN}")] or lost
        names = " and ".join(f"rank {beat.rank} on {beat.host}, last seen {beat.phrase}," for beat in lost)
        return f"{names} died or is unreachable: the connection broke" if lost else None

    # The thread that makes heartbeats.

    def _tick(self, seconds: float) -> None:
        if self._over.is_set():
            return
        self._latest = self.heartbeats.next(seconds)
        self._suspended = max(self._suspended, seconds)
        self._unanswered += min(seconds, 2 * TICK)
        timeout = self.heartbeats.limits.timeout
        if self._unanswered > timeout + self.interval:
            self._end(self._without_store(), (self.first,) if self.first else ())

    def _without_store(self) -> str:
        if self.first is not None and self.first.phrase.startswith(ENDING):
            return (
                f"rank 0 on {self.first.host}, last seen {self.first.phrase}, has ended, and says why; its store at "
                f"{self.address} is closed"
            )
        if refuses(self.address):
            return (
                f"{self._rank_zero()} has died or ended: its machine answers, but nothing serves the store at "
                f"{self.address} any more"
            )
        return (
            f"{self._rank_zero()} stopped answering {self._unanswered:.0f} s ago: the process is suspended, or its "
            f"machine, which serves the store at {self.address}, is down or unreachable "
            f"(extensions.watchdog.timeout={self.heartbeats.limits.timeout:g} s)"
        )

    def _rank_zero(self) -> str:
        return f"rank 0 on {self.first.host}, last seen {self.first.phrase}," if self.first else "rank 0"

    # The thread that uses the store.

    def _exchange_until_over(self) -> None:
        """Exchange heartbeats until the block ends; connect again after an error, while the other thread counts."""
        while True:
            try:
                self._exchange_all(self._connected())
                return
            except RuntimeError as error:
                log.info("the connection to the store %s broke: %s", self.address, error)
            if self._suspended > self.heartbeats.limits.timeout and not self._over.is_set():
                self._end(
                    f"this process was suspended for {self._suspended:.0f} s, and the run ended in the meantime", ()
                )
            if self._over.wait(self.interval):
                return

    def _exchange_all(self, store: Any) -> None:
        last = time.monotonic()
        while True:
            over, now = self._over.is_set(), time.monotonic()
            self.listener.pass_time(now - last)  # first, because the heartbeats that it now hears are new
            self._exchange(store)
            self._unanswered = self._suspended = 0.0
            if self.heartbeats.rank == 0:
                say_each(self.clocks.sentences(now - last))
            last = now
            self._judge(store)
            if over:
                return
            self._over.wait(self.interval)

    def _connected(self, seconds: float = 60) -> Any:
        """A new connection for this thread only, because calls on one connection wait for each other."""
        from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

        host, _, port = self.address.rpartition(":")
        store = TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=timedelta(seconds=seconds))
        return PrefixStore(self.prefix, store)

    def _exchange(self, store: Any) -> None:
        silent = [process_of(beat) for beat in self._silent()]
        store.set(f"beat/{self.heartbeats.rank}", json.dumps(asdict(replace(self._latest, silent=silent))))
        self.clocks.hear(self._latest)
        for rank, beat in self._read(store, self.listener.last_beats).items():
            self.listener.hear(rank, beat)
            self.clocks.hear(beat)
            if rank == 0:
                self.first = beat
                for process in filter(has_ended, beat.silent):
                    store.set(_ended_key(process), "1")
        for beat in self._silent():
            process = process_of(beat)
            self.listener.last_beats[beat.rank].has_ended = has_ended(process) or store.check([_ended_key(process)])

    def _silent(self) -> list[Beat]:
        """On rank 0: the last heartbeats of ranks whose next one is late. Processes on their machine look for them."""
        last_beats = self.listener.last_beats.values() if self.heartbeats.rank == 0 else ()
        return [last.beat for last in last_beats if last.beat is not None and last.silent > 1.5 * self.interval]

    def _read(self, store: Any, ranks: Collection[int]) -> dict[int, Beat]:
        """The last heartbeats of `ranks`, without those of ranks that have sent none yet."""
        keys = {f"beat/{rank}": rank for rank in ranks}
        present = list(keys) if keys and store.check(list(keys)) else [key for key in keys if store.check([key])]
        texts = store.multi_get(present) if present else []
        return {keys[key]: Beat(**json.loads(text)) for key, text in zip(present, texts, strict=True)}

    def _judge(self, store: Any) -> None:
        if self.heartbeats.rank != 0:
            if store.check(["verdict"]):
                published = json.loads(store.get("verdict"))
                self._end(published["sentence"], [Beat(**beat) for beat in published["beats"]])
            verdict = self.listener.silence()
        else:
            verdict = self._verdict()
            if verdict is not None:
                beats = [asdict(beat) for beat in verdict.beats]
                store.set("verdict", json.dumps({"sentence": verdict.text, "beats": beats}))
                time.sleep(3 * self.interval)  # the other ranks read it before this process, and the store, ends
        if verdict is not None:
            self._end(verdict.text, verdict.beats)

    def _verdict(self) -> Verdict | None:
        """The verdict about all ranks, including rank 0 itself."""
        everyone = Listener([], late=self.listener.late)
        everyone.last_beats = dict(self.listener.last_beats)
        everyone.last_beats[0] = LastBeat(self._latest)
        return everyone.verdict()

    def _end(self, text: str, named: Collection[Beat]) -> None:
        """Print a sentence and end this process with status 1; its main thread may wait in a collective forever."""
        with self._lock:
            if self._over.is_set():  # the block has ended
                return
            os.write(2, f"mplug: {text}\n".encode())
            for beat in named:
                kill_if_here(beat)
            writing = threading.Thread(target=log.error, args=("the run ends: %s", text), daemon=True)
            writing.start()
            writing.join(LOG_SECONDS)
            os._exit(1)


def _ended_key(process: Mapping[str, Any]) -> str:
    """Where the store holds that a process does not exist any more."""
    return f"ended/{process['rank']}/{process['pid']}"


def refuses(address: str) -> bool:
    """Whether the machine of an address answers that no process listens there. One that is down does not answer."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=1.0).close()
    except OSError as error:
        return isinstance(error, ConnectionRefusedError)
    return False


def kill_if_here(beat: Beat) -> None:
    """Kill the process of a heartbeat if it is on this machine, so that it cannot resume and write to files."""
    is_local = beat.host == socket.gethostname() and beat.pid != os.getpid()
    if is_local and beat.born and born(beat.pid) == beat.born:
        with suppress(OSError):
            os.kill(beat.pid, signal.SIGKILL)
