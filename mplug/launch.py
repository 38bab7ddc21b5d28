"""From one command to the processes of a run: joins them when already launched, else launches them on this machine."""

import json
import logging
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import wait as futures_wait
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from types import FrameType
from typing import Any, Self

from mplug.errors import RunError, UsageError

# launcher -> the variables that hold a process's rank, their number, and the rank on its machine
LAUNCHERS = {
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
    "mpirun": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    "srun": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
}
DEFAULT_PORT = 29500


@dataclass(frozen=True)
class World:
    """This process among those of its run."""

    rank: int
    size: int
    local_rank: int
    launcher: str


class Stopped(Exception):
    """A signal has ended the processes of a launch, each in its own way."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.signal = int(number)


def launched() -> World | None:
    """The world that torchrun, mpirun or srun has put this process into; None where it is alone."""
    for launcher, names in LAUNCHERS.items():
        values = [os.environ.get(name) for name in names]
        if all(value is not None and value.isdigit() for value in values):
            rank, size, local_rank = (int(value or 0) for value in values)
            return World(rank, size, local_rank, launcher) if size > 1 else None
    return None


def refuse_port_in_use(port: int) -> None:
    """Raise UsageError where someone listens on a port already."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            raise UsageError(
                f"--master-port {port} is in use; choose another, or leave it out for a free one"
            ) from None


@contextmanager
def joined(world: World, device: str) -> Iterator[None]:
    """Make this process part of its world for a block: its GPU, its threads, torch's default process group."""
    import torch
    import torch.distributed as dist
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]
    from torch.distributed.rendezvous import rendezvous

    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", str(DEFAULT_PORT))
    os.environ |= {"RANK": str(world.rank), "WORLD_SIZE": str(world.size), "LOCAL_RANK": str(world.local_rank)}
    options: dict[str, Any]
    if device == "cuda":
        gpus = torch.cuda.device_count()
        if world.local_rank >= gpus:
            raise UsageError(
                f"this machine has {gpus} GPUs, too few for its processes; use fewer, or trainer.device=cpu"
            )
        torch.cuda.set_device(world.local_rank)
        torch.zeros((), device="cuda", requires_grad=True).backward()  # gives autograd's thread its CUDA context
        os.environ.setdefault("TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING", "false")  # stages expect it
        options = {"backend": "nccl", "device_id": torch.device("cuda", world.local_rank)}
    else:
        torch.set_num_threads(max(1, torch.get_num_threads() // world.size))
        options = {"backend": "gloo"}
    store, rank, size = next(rendezvous("env://"))
    # A restarted agent keeps its store, and ranks would read the addresses of the attempt before (pytorch #135712).
    attempt = PrefixStore(f"attempt_{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)
    dist.init_process_group(store=attempt, rank=rank, world_size=size, **options)
    yield
    dist.destroy_process_group()  # not after an error: it would wait for the other ranks


def agreed(value: Any) -> Any:
    """Rank 0's value, on every rank."""
    import torch.distributed as dist

    values = [value]
    dist.broadcast_object_list(values)
    return values[0]


def launch(size: int, work: Callable[..., Any], *arguments: Any, port: int | None = None) -> Any:
    """Run `work(*arguments)` in `size` processes on this machine, and return what rank 0 returns.

    Each process finds its rank in the environment, as under torchrun. When one dies, the others are ended, and the
    error of the first is raised here: a UsageError or RunError as it was there, anything else as a RunError. SIGINT and
    SIGTERM are handed on to the processes; a second one ends them at once. No process outlives this one.
    """
    multiprocessing.set_forkserver_preload(["mplug.loop", "mplug.job"])
    pipes = [multiprocessing.Pipe(duplex=False) for _ in range(size)]
    ends, senders = [reader for reader, _ in pipes], [writer for _, writer in pipes]
    handed_on = Handler(senders)
    with ThreadPoolExecutor(1) as pool, handed_on:
        # In its own thread, because in the main one elastic takes signals over, and does not poll while it stops.
        running = pool.submit(_elastic, size, port, work, arguments, ends)
        while not running.done():
            futures_wait([running], timeout=0.2)
    for connection in (*ends, *senders):
        connection.close()
    error = running.exception()
    if error is not None and handed_on.signal is not None:
        raise Stopped(handed_on.signal) from error
    return running.result()


class Handler:
    """Hands the first SIGINT or SIGTERM on to the processes; at a second, drops them: they end when their pipe does."""

    signal: int | None = None

    def __init__(self, senders: list[Connection]) -> None:
        self.senders = senders

    def __enter__(self) -> Self:
        self._previous = {number: signal.signal(number, self._handle) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        for sender in self.senders:
            sender.close() if self.signal else sender.send(number)
        self.signal = number


def _elastic(size: int, port: int | None, work: Callable[..., Any], arguments: tuple[Any, ...], ends: Any) -> Any:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # pytorch #135712
    for name in list(logging.root.manager.loggerDict):
        if name.startswith(("torch.distributed.elastic", "torch.multiprocessing")):
            logging.getLogger(name).setLevel(logging.CRITICAL)  # what failed is said in a sentence, by us
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
        raise _first(error.failures) from None


class _ProcessFailure(Exception):
    """Carries what a process failed with, and when, to the launcher: elastic keeps the text of an exception."""


def _process(ends: list[Connection], work: Callable[..., Any], *arguments: Any) -> Any:
    """Do a process's work, out of reach of the terminal's Ctrl-C, which the launcher hands on once."""
    os.setsid()
    threading.Thread(target=_obey, args=(ends[int(os.environ["LOCAL_RANK"])],), daemon=True).start()
    try:
        return work(*arguments)
    except Exception as error:
        described = [time.monotonic_ns(), type(error).__name__, str(error)]
        raise _ProcessFailure(json.dumps(described)) from error


def _obey(end: Connection) -> None:
    """Send this process the signals that the launcher hands on; end it when the launcher is gone."""
    while True:
        try:
            os.kill(os.getpid(), end.recv())
        except EOFError:
            os.kill(os.getpid(), signal.SIGKILL)


def _first(failures: Mapping[int, Any]) -> UsageError | RunError:
    """What the process that failed first has said, as the error that it was there.

    A process that a signal has ended comes before those whose connection it broke; elastic itself ends with SIGTERM.
    """
    said: list[tuple[int, int, str, str]] = []
    for rank, failure in failures.items():
        if failure.exitcode < 0 and failure.exitcode != -signal.SIGTERM:
            return RunError(f"rank {rank} was ended by {signal.Signals(-failure.exitcode).name}")
        message = failure.message["message"] if isinstance(failure.message, dict) else str(failure.message)
        head, _, described = message.partition(": ")
        when, kind, text = json.loads(described) if head == _ProcessFailure.__name__ else (sys.maxsize, head, described)
        said.append((when, rank, kind, text))
    _, rank, kind, text = min(said)
    if kind == UsageError.__name__:
        return UsageError(text)
    return RunError(text if kind == RunError.__name__ else f"rank {rank} failed, as its log tells: {kind}: {text}")
