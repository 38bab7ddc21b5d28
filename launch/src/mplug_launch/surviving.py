"""What a process of such a launch does that outlives the death of another one (`survivors`).

A thread receives the `Membership` of the next attempt, and ends collectives on a GPU that wait for the dead process;
those on a CPU end by themselves, because the connection is closed. It also ends waits at the store, where the dead
process may be expected. The main thread leaves its work with an error, frees what the work has built, and does it again
with the variables of its new rank. Spare processes wait from the start, with all modules imported.
"""

import gc
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from mplug.distributed.world import LOCALHOST
from mplug.errors import Diverged, UsageError
from mplug_launch.launch import report_termination
from mplug_launch.meeting import GPU
from mplug_launch.pipes import Pipe, Started
from mplug_launch.store_connections import end_waits

log = logging.getLogger("mplug")

PATIENCE = 5.0
"""Seconds in which a process that has failed waits for the news that another one has died."""
ROUNDS = 5
"""Maximum number of collections of garbage after a death."""
ENVIRONMENT = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",  # torch's own thread would end a process whose collective has failed
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    "NCCL_RAS_ENABLE": "0",  # its thread reads freed memory when a new process joins (NVIDIA/nccl #1996, #2406)
}
"""Variables with which a process outlives another one, unless the user has set them."""


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


@dataclass(frozen=True)
class Left:
    """A process has left its work with an error, which it keeps for `PATIENCE`: another one may have died."""

    attempt: int


@dataclass(frozen=True)
class GiveUp:
    """All processes have left their work, so none of them has died: no other attempt follows."""


class Inbox:
    """Receives what the launcher sends: signals, and memberships."""

    def __init__(self, line: Pipe) -> None:
        self._line, self._ends_collectives = line, False
        self._newest: Membership | None = None
        self._is_last = False
        self._changed = threading.Condition()
        threading.Thread(target=self._receive, daemon=True, name="mplug launcher").start()

    def take(self, seconds: float | None = None) -> Membership | None:
        """The newest membership; None if none comes in so many seconds."""
        with self._changed:
            while not self._changed.wait_for(lambda: self._newest is not None or self._is_last, seconds):
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
            if isinstance(message, GiveUp):
                with self._changed:
                    self._is_last = True
                    self._changed.notify_all()
                continue
            if not isinstance(message, Membership):
                os.kill(os.getpid(), message)
                continue
            self._ends_collectives = True
            if message.attempt:
                abort_collectives()  # before the main thread makes the groups of the next attempt
            with self._changed:
                self._newest, self._is_last = message, False  # a process has died while the others gave up
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


def take_part(
    number: int,
    ends: Sequence[Connection],
    rehearse: Callable[..., object] | None,
    work: Callable[..., Any],
    *arguments: Any,
) -> None:
    """Do the work of a process as often as a membership asks for it, in a session of its own."""
    os.setsid()
    os.environ |= {name: value for name, value in ENVIRONMENT.items() if name not in os.environ}
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
    with suppress(OSError):  # the launcher has closed the pipe
        line.send(Left(attempt))
    again = inbox.take(patience)  # the error and what its traceback holds are free here
    return (None, again) if again is not None else (failure, None)


def leave_groups() -> None:
    """Free the process groups of an attempt, which closes their connections: others may wait for this process."""
    import torch
    import torch.distributed as dist

    if dist.is_initialized():  # those of a GPU have been aborted
        dist.destroy_process_group()
    torch.compiler.reset()
    collect_all()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def collect_all() -> None:
    """Collect garbage until none is found: one collection may leave process groups, and so their connections.

    The collector does not visit the hooks of an autograd node that a graph owns (`THPCppFunction_traverse` of torch).
    An error in a pipeline leaves graphs whose backward pass has not run. The first collection frees these graphs. Only
    then can a second one find what their hooks keep: gradient sinks, and the groups that sum them.
    """
    for _ in range(ROUNDS):
        if not gc.collect():
            return
