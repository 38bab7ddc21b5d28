"""The processes of a run: `launch` starts them on this machine, `joined` makes the current process one of them."""

import gc
import logging
import multiprocessing
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection
from multiprocessing.connection import Connection
from typing import Any

from mplug.distributed.signals import Signals
from mplug.distributed.supervision import Monitor, PluginMessage, Supervisor
from mplug.distributed.world import World
from mplug.errors import Diverged, PluginError, RunError, UsageError

GRACE = 3.0
"""Seconds in which the other processes may report their errors and end, after one has failed."""
AT_ONCE = 0.3
"""Maximum number of seconds by which the launcher may notice a death later than the errors that it causes elsewhere."""
TERMINATED = "terminated"
"""The message of a process that ends because the launcher sent SIGTERM; it has not failed."""
PASSED_UNCHANGED: dict[str, type[UsageError | RunError]] = {
    error.__name__: error for error in (UsageError, RunError, Diverged)
}
"""Errors of a process that the launcher raises unchanged, because their message addresses the user."""


class Failed(RunError):
    """The report of torch elastic about the first process that it saw fail."""

    def __init__(self, message: str, exit_codes: Mapping[int, int]) -> None:
        super().__init__(message)
        self.exit_codes = exit_codes


class Stopped(Exception):
    """A signal has ended the processes of a launch; they handled it themselves."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.signal = int(number)


def refuse_port_in_use(port: int) -> None:
    """Raise UsageError if a port is in use."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            raise UsageError(
                f"--master-port {port}: this port is in use; use another one, or remove the option for a free port"
            ) from None


@contextmanager
def joined(
    world: World,
    device: str,
    timeout: timedelta | None = None,
    exchanging: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Iterator[None]:
    """Make this process part of its world for the block: set its GPU, its threads, torch's default process group.

    `timeout` is torch's time-out for a collective. The context manager that `exchanging` returns is entered after the
    processes have met, and surrounds the rest of the block.
    """
    import torch
    import torch.distributed as dist
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]

    from mplug.distributed.meeting import gpu_of, interfaces, meet, member, num_threads, open_store

    gpus = torch.cuda.device_count() if device == "cuda" else 0
    gpu = gpu_of(world.local_rank, gpus) if gpus else 0
    if gpus:
        torch.cuda.set_device(gpu)
    # A restarted agent keeps its store, and ranks would read the addresses of the previous attempt (pytorch #135712).
    # Another job may use the same port: its processes have another prefix and do not read these keys.
    store = PrefixStore(f"{world.job}_attempt_{world.restart}", open_store(world))
    own = member(world.address, device, str(torch.cuda.get_device_properties(gpu).uuid) if gpus else "", gpus)
    decision = meet(world, store, own)
    os.environ |= interfaces(world, own, decision)
    if not {"OMP_NUM_THREADS", "MKL_NUM_THREADS"} & os.environ.keys():
        torch.set_num_threads(num_threads(own.cpus, decision.cpus, torch.get_num_threads()))
    options: dict[str, Any] = {"backend": "gloo"}
    if gpus:
        torch.zeros((), device="cuda", requires_grad=True).backward()  # creates the CUDA context of autograd's thread
        os.environ.setdefault("TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING", "false")  # known, and intended
        options = {"backend": "nccl", "device_id": torch.device("cuda", gpu)}
    with exchanging():
        dist.init_process_group(store=store, rank=world.rank, world_size=world.size, timeout=timeout, **options)
        yield
        gc.collect()  # a CUDA graph in a reference cycle would keep the communicators in use that it has recorded
        dist.destroy_process_group()  # not after an error: it would wait for the other ranks


def agreed(value: Any) -> Any:
    """Rank 0's value, on every rank."""
    import torch.distributed as dist

    values = [value]
    dist.broadcast_object_list(values)
    return values[0]


def launch(
    size: int,
    work: Callable[..., Any],
    *arguments: Any,
    port: int | None = None,
    supervisor: Supervisor | None = None,
) -> Any:
    """Run `work(*arguments, send)` in `size` processes on this machine, and return the result of rank 0.

    Each process reads its rank from the environment, as under torchrun, and calls `send(step)` at every step. If a
    process dies, the launcher ends the others and raises the error of the first one: a UsageError or RunError
    unchanged, any other error as a RunError that names rank, host and step. With a supervisor, the launcher kills a
    process that hangs, and the error names it. It forwards SIGINT and SIGTERM to the processes; a second signal kills
    them at once. No process outlives this one.
    """
    multiprocessing.set_forkserver_preload(["mplug.training.loop", "mplug.training.job"])
    pipes = Pipes(size, supervisor.monitor() if supervisor else None)
    with ThreadPoolExecutor(1) as pool, Handler(pipes) as handler:
        # In a separate thread: in the main thread, elastic installs signal handlers, and does not poll while it stops.
        running = pool.submit(_elastic, size, port, work, arguments, pipes.child_ends)
        while not running.done():
            pipes.listen(0.2)
            pipes.end_hang()
            if pipes.failing_for() > GRACE:
                pipes.kill()  # a process that waits in a collective for a dead one does not handle elastic's SIGTERM
    pipes.listen(0.0)
    pipes.close()
    error = running.exception()
    if error is None:
        return running.result()
    if handler.signal is not None and not pipes.failed_before(handler.when):
        raise Stopped(handler.signal) from error
    raise pipes.first_failure(_exit_codes(error)) or error


def _exit_codes(error: BaseException) -> Mapping[int, int]:
    return error.exit_codes if isinstance(error, Failed) else {}


def _cause_of_death(exit_code: int) -> str:
    """How a process died that sent no error; a negative status is the number of a signal."""
    if exit_code < 0:
        return f"of {signal.Signals(-exit_code).name}"
    return "without an error message, for example by SIGKILL or because memory ran out"


@dataclass(frozen=True)
class Started:
    """The first message of a process. Its process id is also the id of its process group."""

    pid: int


class Pipe:
    """A process's end of the pipe to the launcher; all threads of the process may use it."""

    def __init__(self, line: Connection) -> None:
        self._line, self._lock = line, threading.RLock()  # a signal may interrupt the main thread while it sends

    def send(self, message: object) -> None:
        """Send a message; drop that of a plugin if the pipe is full, because the launcher may be suspended."""
        with self._lock:
            if not isinstance(message, PluginMessage) or select.select([], [self._line], [], 0)[1]:
                self._line.send(message)

    def recv(self) -> Any:
        """Wait for the launcher's next message."""
        return self._line.recv()


class Pipes:
    """The launcher's pipes to its processes: it sends signals, and receives messages.

    A process sends `Started`, the number of each step that it starts, messages of a plugin for `monitor`, and at its
    end "done", "terminated" or its error. A process whose pipe closes without one of these three was killed. The
    launcher needs these messages because elastic reports one failure only. This may be the failure of a process whose
    connection broke when another process died.
    """

    def __init__(self, size: int, monitor: Monitor | None = None) -> None:
        pairs = [multiprocessing.Pipe() for _ in range(size)]
        self.child_ends = [child_end for _, child_end in pairs]
        self.own_ends = {own_end: rank for rank, (own_end, _) in enumerate(pairs)}
        self.ends: list[tuple[float, int, Any]] = []
        """(time, rank, last message or None) of every process that has ended or is about to end."""
        self.steps: dict[int, int] = {}
        self.pids: dict[int, int] = {}
        self.monitor = monitor
        self.last_look = time.monotonic()

    def listen(self, seconds: float) -> None:
        """Receive the messages of the processes; wait at most `seconds` for the first."""
        if not self.own_ends:
            time.sleep(seconds)
        for line in connection.wait(list(self.own_ends), seconds) if self.own_ends else ():
            assert isinstance(line, Connection)
            rank = self.own_ends.get(line)
            if rank is None:  # a second signal has closed the pipe in the meantime
                continue
            try:
                message = line.recv()
                if isinstance(message, Started):
                    self.pids[rank] = message.pid
                elif isinstance(message, PluginMessage):
                    if self.monitor is not None:
                        self.monitor.hear(rank, message.content)
                elif isinstance(message, int):
                    self.steps[rank] = message
                    if self.monitor is not None:
                        self.monitor.begin_step(rank, message)
                else:
                    self._end(rank, message)
            except (EOFError, OSError):
                self._end(rank, None)
                self.own_ends.pop(line, None)
        if self.child_ends and len(self.pids) == len(self.child_ends):
            self._close_child_ends()

    def _end(self, rank: int, message: Any, seconds_ago: float = 0.0) -> None:
        """Record the end of a process with its last message, or None if it sent none."""
        self.ends.append((time.monotonic() - seconds_ago, rank, message))
        if self.monitor is not None:
            self.monitor.leave(rank)

    def end_hang(self) -> None:
        """Kill the processes that hang, as the monitor reports, and record their failure as the first."""
        now = time.monotonic()
        elapsed, self.last_look = now - self.last_look, now
        hang = self.monitor.hang(elapsed) if self.monitor is not None else None
        if hang is None or self._failures():
            return
        for rank in hang.ranks:
            self._end(rank, (RunError.__name__, hang.sentence), seconds_ago=2 * AT_ONCE)
            self._kill(rank)

    def _kill(self, rank: int) -> None:
        """Kill a process and its children with SIGKILL, which also works on stopped processes."""
        if rank in self.pids and rank in self.own_ends.values():
            with suppress(ProcessLookupError):
                os.killpg(self.pids[rank], signal.SIGKILL)

    def _close_child_ends(self) -> None:
        """Close the launcher's copies of the processes' ends, so that the death of a process closes its pipe."""
        for end in self.child_ends:
            end.close()
        self.child_ends = []

    def failed_before(self, when: float) -> bool:
        """Whether a process died before the time `when`, or has reported an error."""
        return any(message is not None or failed < when for failed, _, message in self._failures())

    def failing_for(self) -> float:
        """Seconds since the first process failed or was terminated; 0 if there was none."""
        ended = [when for when, _, message in self.ends if message == TERMINATED]
        ended += [when for when, _, _ in self._failures()]
        return time.monotonic() - min(ended) if ended else 0.0

    def _failures(self) -> list[tuple[float, int, Any]]:
        """(time, rank, error message or None) of every failed process.

        A process that dies breaks the connections of others, whose errors may arrive before its death is noticed. So
        the time of a death is moved `AT_ONCE` seconds back, before those errors.
        """
        reported = {rank for _, rank, message in self.ends if message is not None}
        return [
            (when - (AT_ONCE if message is None else 0), rank, message)
            for when, rank, message in self.ends
            if isinstance(message, tuple) or (message is None and rank not in reported)
        ]

    def first_failure(self, exit_codes: Mapping[int, int]) -> UsageError | RunError | None:
        """The error of the first process that failed, with the type that it had there; None if no process failed."""
        first = min(self._failures(), default=None, key=lambda failure: failure[0])
        if first is None:
            return None
        _, rank, message = first
        if message is None:
            return RunError(f"{self._rank_name(rank)} died {_cause_of_death(exit_codes.get(rank, 0))}")
        kind, text = message
        if kind == PluginError.__name__:
            return PluginError(f"rank {rank} on {socket.gethostname()}: {text}")
        if kind in PASSED_UNCHANGED:
            return PASSED_UNCHANGED[kind](text)
        return RunError(f"{self._rank_name(rank)} failed with {kind}: {text}")

    def _rank_name(self, rank: int) -> str:
        where = f"in step {self.steps[rank]}" if rank in self.steps else "before its first step"
        return f"rank {rank} on {socket.gethostname()}, {where},"

    def kill(self) -> None:
        """Kill all processes at once, including stopped ones."""
        for rank in list(self.own_ends.values()):
            self._kill(rank)
        self.close()

    def close(self) -> None:
        """Close all pipes; processes that still run then end."""
        self._close_child_ends()
        for line in list(self.own_ends):
            line.close()
        self.own_ends = {}


class Handler(Signals):
    """Forwards the first SIGINT or SIGTERM to the processes; a later one kills them."""

    def __init__(self, pipes: Pipes) -> None:
        self.pipes = pipes

    def first(self, number: int) -> None:
        """Forward the signal."""
        for line in list(self.pipes.own_ends):
            with suppress(OSError):  # that process has ended
                line.send(number)

    def later(self, number: int) -> None:
        """Kill the processes."""
        self.pipes.kill()


def _elastic(size: int, port: int | None, work: Callable[..., Any], arguments: tuple[Any, ...], ends: Any) -> Any:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # pytorch #135712
    for name in list(logging.root.manager.loggerDict):
        if name.startswith(("torch.distributed.elastic", "torch.multiprocessing")):
            logging.getLogger(name).setLevel(logging.CRITICAL)  # the launcher reports failures in one sentence itself
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=size,
        rdzv_backend="c10d",
        rdzv_endpoint=f"localhost:{port or 0}",
        run_id=str(os.getpid()),
        start_method="forkserver",
        max_restarts=0,
        monitor_interval=0.1,
        local_addr="127.0.0.1",
    )
    try:
        return elastic_launch(config, _process)(ends, work, *arguments)[0]
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        raise Failed(
            f"rank {rank} ended with status {failure.exitcode}; see its log in the run folder", {rank: failure.exitcode}
        ) from None


def _process(ends: list[Connection], work: Callable[..., Any], *arguments: Any) -> Any:
    """Do the work of one process in a session of its own: only the launcher receives Ctrl-C, and forwards it once."""
    os.setsid()
    line = Pipe(ends.pop(int(os.environ["LOCAL_RANK"])))
    for end in ends:
        end.close()
    _report_termination(line)
    line.send(Started(os.getpid()))
    threading.Thread(target=_forward_signals, args=(line,), daemon=True).start()
    try:
        result = work(*arguments, line.send)
    except Exception as error:
        line.send((type(error).__name__, str(error)))
        raise
    line.send("done")
    return result


def _report_termination(line: Pipe) -> None:
    """Send `TERMINATED` before dying of SIGTERM: elastic ends processes whose errors it has not received yet."""

    def terminated(number: int, frame: object) -> None:
        with suppress(OSError):  # the launcher has closed the pipe
            line.send(TERMINATED)
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    signal.signal(signal.SIGTERM, terminated)


def _forward_signals(line: Pipe) -> None:
    """Send this process the signals that the launcher forwards; kill it when the launcher closes the pipe."""
    while True:
        try:
            os.kill(os.getpid(), line.recv())
        except (EOFError, OSError):
            os.kill(os.getpid(), signal.SIGKILL)
