"""The launcher: it starts the processes of a run on this machine, and ends them together."""

import logging
import multiprocessing
import os
import signal
import socket
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from mplug.distributed.supervision import Supervisor
from mplug.errors import RunError, UsageError
from mplug.run.launching import Stopped
from mplug_launch.pipes import TERMINATED, Handler, Pipe, Pipes, PortInUse, Started

STARTS = 3
"""How often the processes are started at most, if their port is taken every time."""
PRELOADED = ["mplug.training.loop", "mplug.training.job"]
"""The modules that processes have imported when they start."""
GRACE = 3.0
"""Seconds in which the other processes may report their errors and end, after one has failed."""


class Failed(RunError):
    """The report of torch elastic about the first process that it saw fail."""

    def __init__(self, message: str, exit_codes: Mapping[int, int]) -> None:
        super().__init__(message)
        self.exit_codes = exit_codes


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

    The processes meet at a port that was free when torch elastic chose it. If another program has taken it by the time
    they start, they are started again, with another one.
    """
    multiprocessing.set_forkserver_preload(PRELOADED)
    for _ in range(1, STARTS):
        with suppress(PortInUse):
            return _launched(size, work, arguments, port, supervisor)
    return _launched(size, work, arguments, port, supervisor)


def _launched(
    size: int, work: Callable[..., Any], arguments: tuple[Any, ...], port: int | None, supervisor: Supervisor | None
) -> Any:
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
    report_termination(line)
    line.send(Started(os.getpid()))
    threading.Thread(target=_forward_signals, args=(line,), daemon=True).start()
    try:
        result = work(*arguments, line.send)
    except Exception as error:
        line.send((type(error).__name__, str(error)))
        raise
    line.send("done")
    return result


def report_termination(line: Pipe) -> None:
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
