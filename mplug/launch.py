"""From one command to the processes of a run: joins them when already launched, else launches them on this machine."""

import ctypes
import logging
import multiprocessing
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

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
    error of the first is raised here: a UsageError or RunError as it was there, anything else as a RunError.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # pytorch #135712
    for name in list(logging.root.manager.loggerDict):
        if name.startswith(("torch.distributed.elastic", "torch.multiprocessing")):
            logging.getLogger(name).setLevel(logging.CRITICAL)  # what failed is said in a sentence, by us
    multiprocessing.set_forkserver_preload(["mplug.loop", "mplug.job"])
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
        return elastic_launch(config, _with_parent)(os.getpid(), work, *arguments)[0]
    except ChildFailedError as error:
        raise _explained(*error.get_first_failure()) from None
    except SignalException as stop:  # handed on to the processes, which have ended by now
        raise Stopped(stop.sigval) from None


def _explained(rank: int, failure: Any) -> UsageError | RunError:
    """What the first process that failed has said, as the error that it was there."""
    if failure.exitcode < 0:
        return RunError(f"rank {rank} was ended by {signal.Signals(-failure.exitcode).name}")
    said = failure.message["message"] if isinstance(failure.message, dict) else failure.message
    kind, _, text = str(said).partition(": ")
    if kind == UsageError.__name__:
        return UsageError(text)
    return RunError(text if kind == RunError.__name__ else f"rank {rank} failed, as its log tells: {said}")


def _with_parent(launcher: int, work: Callable[..., Any], *arguments: Any) -> Any:
    """Do a process's work, out of reach of the terminal's Ctrl-C, which the launcher hands on once.

    On Linux it dies with its parent, and so no process outlives the command.
    """
    os.setsid()
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    return work(*arguments)
