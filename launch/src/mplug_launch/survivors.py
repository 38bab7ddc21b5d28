"""A launcher whose processes outlive the death of one of them: they begin their work again, as another world.

The launcher serves the store at which the processes meet, so it outlives all of them. When a process dies, the launcher
sends each of the others a `Membership`: its rank in the next attempt, or that it waits as a spare. A thread of the
process receives it, and ends collectives on a GPU that wait for the dead process; those on a CPU end by themselves,
because the connection is closed. It also ends waits at the store, where the dead process may be expected. The main
thread leaves its work with an error, frees what the work has built, and does it again with the variables of its new
rank. Spare processes wait from the start, with all modules imported.
"""

import gc
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from mplug.distributed.supervision import Supervisor
from mplug.distributed.world import LOCALHOST
from mplug.errors import Diverged, RunError, UsageError
from mplug.run.launching import Healing, Stopped
from mplug_launch.launch import GRACE, PRELOADED, report_termination
from mplug_launch.meeting import GPU
from mplug_launch.pipes import TERMINATED, Handler, Pipe, Pipes, Started, cause_of_death
from mplug_launch.store_connections import end_waits

log = logging.getLogger("mplug")

LEAVING = 30.0
"""Seconds in which a process that has done its work may end what plugins have begun."""
LATE = -1
"""The key of the result of a process that has done its work in an earlier attempt."""
PATIENCE = 5.0
"""Seconds in which a process that has failed waits for the news that another one has died."""
WITHOUT_WATCH = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0"}
"""Variables with which torch's own thread does not end a process because a collective has failed."""


@dataclass(frozen=True)
class Membership:
    """The place of a process in an attempt; a process whose rank is None waits as a spare."""

    attempt: int
    rank: int | None
    size: int
    port: int
    gpu: int

    def enter(self) -> None:
        """Set the variables of torchrun, from which the work reads its world."""
        os.environ |= {
            "MASTER_ADDR": LOCALHOST,
            "MASTER_PORT": str(self.port),
            "RANK": str(self.rank),
            "LOCAL_RANK": str(self.rank),
            "WORLD_SIZE": str(self.size),
            "LOCAL_WORLD_SIZE": str(self.size),
            "TORCHELASTIC_RUN_ID": str(os.getppid()),
            "TORCHELASTIC_RESTART_COUNT": str(self.attempt),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            GPU: str(self.gpu),
        }


@dataclass(frozen=True)
class Done:
    """The last message of a process that has done its work, and the attempt in which it did."""

    attempt: int
    result: Any


@dataclass(frozen=True)
class Entered:
    """A process begins its work in an attempt; what it has sent before is of an earlier one."""

    attempt: int


# In the launcher.


def launch_survivors(
    size: int,
    work: Callable[..., Any],
    arguments: tuple[Any, ...],
    port: int | None,
    supervisor: Supervisor | None,
    healing: Healing,
) -> Any:
    """Run `work(*arguments, send)` in `size` processes that outlive each other; the result of rank 0.

    Raises the errors of `launch` if the run cannot go on.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    multiprocessing.set_forkserver_preload(PRELOADED)
    store = TCPStore(LOCALHOST, port or 0, is_master=True, wait_for_workers=False)
    crew = Crew(size, store.port, supervisor, healing)
    with Handler(crew) as handler:
        crew.start(work, arguments)
        try:
            while not crew.is_done:
                crew.listen(0.2)
                crew.end_orphans()
                crew.end_hang()
                if handler.signal is not None and crew.is_between_steps:
                    crew.kill()
                    raise Stopped(handler.signal)
                if crew.dead() and not (handler.signal is None and crew.heal()):
                    crew.end_all()
                    if handler.signal is not None and not crew.failed_before(handler.when):
                        raise Stopped(handler.signal)
                    raise crew.first_failure(crew.exit_codes) or RunError("the processes of the run have ended")
        finally:
            crew.end_all()
    return crew.results[min(crew.results)]


class Crew(Pipes):
    """All processes of a launch, by a number that a process keeps, and the ranks of those that take part."""

    def __init__(self, size: int, port: int, supervisor: Supervisor | None, healing: Healing) -> None:
        super().__init__(size + healing.spares)
        self.size, self.port, self.supervisor, self.healing = size, port, supervisor, healing
        self.full, self.attempt = size, 0
        self.ranks = {number: number for number in range(size)}
        """The rank of each process that takes part."""
        self.gpus = dict(self.ranks)
        self.attempts: dict[int, int] = {}
        """The attempt that each process has entered."""
        self.results: dict[int, Any] = {}
        self.hung: set[int] = set()
        self.exit_codes: dict[int, int] = {}
        self.processes: list[Any] = []
        self._watch()

    @property
    def is_done(self) -> bool:
        """Whether all ranks have done their work, or one before it has heard that another one has died meanwhile."""
        return len(self.results) == self.size or LATE in self.results

    @property
    def is_between_steps(self) -> bool:
        """Whether the run goes on after a death, and has not come to a step: its processes may not hear a signal."""
        return self.attempt > 0 and not self.steps

    def start(self, work: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        """Start all processes."""
        context = multiprocessing.get_context("forkserver")
        for number in range(len(self.child_ends)):
            rehearse = None if number < self.size else self.healing.rehearse
            given = (number, self.child_ends, rehearse, work, *arguments)
            process = context.Process(target=_process, args=given)
            process.start()
            self.processes.append(process)
        self._close_child_ends()  # the death of a process is seen from now on, also of one that never begins
        self._send_memberships()

    def hears(self, rank: int, message: object) -> bool:
        """Receive a message that only this launcher knows, or that a process has sent in an earlier attempt."""
        if isinstance(message, Entered):
            self.attempts[rank] = message.attempt
        elif isinstance(message, Done):
            self.results[self.ranks[rank] if message.attempt == self.attempt else LATE] = message.result
            self._end(rank, "done")
        else:
            is_end = message == TERMINATED or isinstance(message, tuple)
            return not is_end and self.attempts.get(rank) != self.attempt
        return True

    def rank_of(self, process: int) -> int:
        """The rank of a process; a number that is no rank if it does not take part."""
        return self.ranks.get(process, self.full + process)

    def processes_of(self, ranks: Sequence[int]) -> Sequence[int]:
        """The numbers of the processes with these ranks, which hang."""
        found = [number for number, rank in self.ranks.items() if rank in ranks]
        self.hung.update(found)
        return found

    def dead(self) -> list[int]:
        """The processes that take part and have failed. Spares that have died are forgotten."""
        self.ends = [end for end in self.ends if end[1] in self.ranks]
        failed = {number for _, number, _ in self._failures()}
        failed |= {number for _, number, message in self.ends if message == TERMINATED}
        return sorted(failed & self.ranks.keys())

    def end_orphans(self) -> None:
        """Kill what a dead process has forked, such as the workers of its loader.

        They hold its connections open, for whose end the launcher and the other ranks wait.
        """
        ended = {end[1] for end in self.ends}
        for number, process in enumerate(self.processes):
            if number not in ended and process.exitcode is not None:
                self._kill(number)

    def heal(self) -> bool:
        """Let the run go on without the processes that have died or hang; False if it cannot."""
        failures = {number: message for _, number, message in self._failures() if number in self.ranks}
        own_errors = [number for number, message in failures.items() if message is not None and number not in self.hung]
        if not failures or own_errors or self.results:
            return False
        sentences = [str(message[1]) if message else self._death_of(number) for number, message in failures.items()]
        alive = [number for number in sorted(self.ranks, key=self.ranks.__getitem__) if number not in failures]
        spares = [number for number in sorted(self.own_ends.values()) if number not in self.ranks]
        chosen = self._chosen(alive, spares)
        if chosen is None:
            return False
        self._go_on(chosen, failures)
        where = f"in {self.size} process{'es' * (self.size > 1)}"
        helpers = sum(number in spares for number in chosen.values())
        helped = f", with {helpers} spare process{'es' * (helpers > 1)}" if helpers else ""
        print(f"mplug: {'; '.join(sentences)}; the run goes on {where}{helped}", file=sys.stderr, flush=True)
        return True

    def _go_on(self, chosen: Mapping[int, int], failures: Collection[int]) -> None:
        """Begin the next attempt, in the processes `chosen` by their ranks; new ones take the GPUs of the dead."""
        gpus = [self.gpus[number] for number in failures]
        for number in chosen.values():
            if number not in self.gpus:
                self.gpus[number] = gpus.pop(0) if gpus else number
        self.ranks, self.size = {number: rank for rank, number in chosen.items()}, len(chosen)
        self.ends = [end for end in self.ends if end[1] not in failures]
        self.hung.clear()
        self.steps.clear()
        self.attempt += 1
        self._watch()
        self._send_memberships()

    def _death_of(self, number: int) -> str:
        return f"{self._rank_name(number)} died {cause_of_death(self.exit_codes.get(number, 0))}"

    def _chosen(self, alive: list[int], spares: list[int]) -> dict[int, int] | None:
        """The processes of the next attempt by their ranks; None if they are too few.

        Survivors come first. Of more survivors than the layout needs, those stay that hold the whole state.
        """
        sizes = sorted({self.full, *self.healing.layouts}, reverse=True)
        size = next((size for size in sizes if size <= len(alive) + len(spares)), None)
        if size is None:
            return None
        if size == self.size:  # the dead ranks are replaced, and the others keep theirs
            chosen = {self.ranks[number]: number for number in alive}
            free = [rank for rank in range(size) if rank not in chosen]
            return chosen | dict(zip(free, spares, strict=False))
        for number in list(alive):
            rest = {self.ranks[other] for other in alive if other != number}
            if len(alive) > size and self.healing.covers(rest, self.size):
                alive.remove(number)
        return dict(enumerate([*alive, *spares][:size]))

    def _watch(self) -> None:
        self.monitor = self.supervisor.monitor() if self.supervisor else None
        for rank in range(self.size, self.full):
            if self.monitor is not None:
                self.monitor.leave(rank)

    def _send_memberships(self) -> None:
        for line, number in list(self.own_ends.items()):
            rank = self.ranks.get(number)
            if rank is not None or self.attempt:
                with suppress(OSError):  # that process has died in the meantime
                    line.send(Membership(self.attempt, rank, self.size, self.port, self.gpus.get(number, number)))

    def _end(self, rank: int, message: Any, seconds_ago: float = 0.0) -> None:
        super()._end(rank, message, seconds_ago)
        if message is None and rank < len(self.processes):
            self.processes[rank].join(1.0)
            self.exit_codes[rank] = self.processes[rank].exitcode or 0

    def end_all(self) -> None:
        """End the processes. Those that have done their work leave by themselves, and others may report an error."""
        if self.is_done:
            deadline = time.monotonic() + LEAVING
            for number in self.ranks.keys() & {end[1] for end in self.ends}:
                self.processes[number].join(max(deadline - time.monotonic(), 0))
        deadline = time.monotonic() + (0.0 if self.is_done else GRACE)
        while self.ranks.keys() - {end[1] for end in self.ends} and time.monotonic() < deadline:
            self.listen(0.1)
        self.kill()
        for process in self.processes:
            process.join(GRACE)


# In each process.


class Inbox:
    """Receives what the launcher sends: signals, and memberships."""

    def __init__(self, line: Pipe) -> None:
        self._line, self._ends_collectives = line, False
        self._newest: Membership | None = None
        self._changed = threading.Condition()
        threading.Thread(target=self._receive, daemon=True, name="mplug launcher").start()

    def take(self, seconds: float | None = None) -> Membership | None:
        """The newest membership; None if none comes in so many seconds."""
        with self._changed:
            while not self._changed.wait_for(lambda: self._newest is not None, seconds):
                if not self._ends_collectives:
                    return None
            found, self._newest = self._newest, None
            return found

    def _receive(self) -> None:
        while True:
            try:
                message = self._line.recv()
            except (EOFError, OSError):
                os.kill(os.getpid(), signal.SIGKILL)
            if not isinstance(message, Membership):
                os.kill(os.getpid(), message)
                continue
            self._ends_collectives = True
            if message.attempt:
                abort_collectives()  # before the main thread makes the groups of the next attempt
            with self._changed:
                self._newest = message
                self._changed.notify_all()
            self._ends_collectives = False
            while message.attempt and self._end_waits(message.port) and not self._line.poll(0.1):
                pass  # the main thread may come to the store of an attempt that has ended only now

    def _end_waits(self, port: int) -> bool:
        """End waits at the store unless the main thread has taken the newest membership: whether it has not."""
        with self._changed:
            if self._newest is not None:
                end_waits(port)
            return self._newest is not None


def abort_collectives() -> None:
    """End the collectives on a GPU that wait for a dead process: NCCL does not notice its death."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized() or not torch.distributed.is_initialized():
        return
    try:
        torch.distributed.distributed_c10d._abort_process_group()
    except Exception as error:
        log.warning("the process groups could not be ended: %s", error)


def _process(
    number: int,
    ends: Sequence[Connection],
    rehearse: Callable[..., object] | None,
    work: Callable[..., Any],
    *arguments: Any,
) -> None:
    """Do the work of a process as often as a membership asks for it, in a session of its own."""
    os.setsid()
    os.environ |= {name: value for name, value in WITHOUT_WATCH.items() if name not in os.environ}
    for other, end in enumerate(ends):
        if other != number:
            end.close()
    line = Pipe(ends[number])
    report_termination(line)
    line.send(Started(os.getpid()))
    inbox = Inbox(line)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if rehearse is not None:
        rehearse(*arguments)
    keep_modules()
    membership = inbox.take()
    while membership is not None:
        if membership.rank is None:
            membership = inbox.take()
            continue
        membership.enter()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        line.send(Entered(membership.attempt))
        message, membership = _attempted(line, inbox, membership.attempt, work, arguments)
        if membership is None:
            line.send(message)
            return
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a process that waits ends with the launcher
        leave_groups()


def keep_modules() -> None:
    """Let a collection after a death look at what the run has made, not at the modules, which takes 0.3 s.

    What is garbage now, such as the rehearsed model, would never be freed, so it is collected before.
    """
    gc.collect()
    gc.freeze()


def _attempted(
    line: Pipe, inbox: Inbox, attempt: int, work: Callable[..., Any], arguments: tuple[Any, ...]
) -> tuple[Any, Membership | None]:
    """(the last message of this process, None), or (None, the membership with which it begins again)."""
    try:
        return Done(attempt, work(*arguments, line.send)), None
    except (UsageError, Diverged) as error:  # a collective that was ended on a GPU may leave any value, also NaN
        failure, patience = (type(error).__name__, str(error)), 0.1
    except Exception as error:
        failure, patience = (type(error).__name__, str(error)), PATIENCE
    again = inbox.take(patience)  # the error and what its traceback holds are free here
    return (None, again) if again is not None else (failure, None)


def leave_groups() -> None:
    """Free the process groups of an attempt, which closes their connections: others may wait for this process."""
    import torch
    import torch.distributed as dist

    if dist.is_initialized():  # those of a GPU have been aborted
        dist.destroy_process_group()
    torch.compiler.reset()
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
