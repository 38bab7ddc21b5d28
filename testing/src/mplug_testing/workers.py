"""Runs functions on several ranks in tests: real processes on this machine, connected by gloo.

    def sums(x: int) -> float:
        total = torch.tensor(float(x + dist.get_rank()))
        dist.all_reduce(total)
        return total.item()

    assert run_workers(2, sums, 1) == [3.0, 3.0]

Each call forks new processes from a server that has imported torch, so they start fast. A test module need not be
importable by name: the workers load it from its file.
"""

import faulthandler
import importlib
import importlib.util
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any, TypeVar

from mplug.errors import UsageError
from mplug.registry.entry_points import BrokenPlugin

R = TypeVar("R")

PRELOAD = [
    *("torch.distributed", "torch._dynamo", "torch._inductor.config", "torch.onnx", "torch.profiler"),
    *(
        "mplug.distributed.groups",
        "mplug.training.job",
        "mplug.training.loop",
        "mplug_ops",
        "mplug_testing.parallel",
        "pytest",
        "hypothesis",
    ),
]
"""Modules that the server imports once for all workers; it skips those that are not installed.

Append the modules of your plugins before the first call. Workers then start with these modules at no cost.
"""

LAST = "mplug_testing.preloaded"
"""The module that the server imports last."""

STACKS = 5.0
"""Seconds that ranks have to write their stacks; a stopped process never writes its stack."""

_LOOPBACK = {"linux": "lo", "darwin": "lo0"}


class WorkerFailed(Exception):
    """A rank raised or died. The message holds its traceback; `refusal` is the message of its UsageError, if any.

    A broken plugin on a rank is no refusal.
    """

    def __init__(self, rank: int, reason: str, refusal: str = "") -> None:
        super().__init__(f"rank {rank} {reason}")
        self.rank, self.reason, self.refusal = rank, reason, refusal


def run_workers(world_size: int, function: Callable[..., R], *args: Any, timeout: float = 300.0) -> list[R]:
    """Call `function(*args)` on every rank of a gloo world, and return the ranks' results in order.

    `function` must be at the top level of its module. It finds its rank in `torch.distributed`. Arguments and results
    are pickled. Each worker computes with one thread, and uses the caller's warning filters.

    Raises WorkerFailed if a rank raises or dies. Raises TimeoutError, with the stacks of the ranks without a result,
    after `timeout` seconds. No worker outlives the call.
    """
    multiprocessing.set_forkserver_preload([*PRELOAD, LAST])
    with TemporaryDirectory(prefix="mplug-workers-") as directory:
        call = pickle.dumps(_located(function)), pickle.dumps(args)
        filters = list(map(_plain, warnings.filters))
        task = _Task(Path(directory), world_size, timeout, filters, sys.path, *call)
        with _workers(task) as workers:
            return _gathered(workers, task)


# Both sides.


@dataclass(frozen=True)
class _Task:
    directory: Path
    world_size: int
    timeout: float
    filters: list[tuple[Any, ...]]
    path: list[str]
    function: bytes
    args: bytes

    def stack_of(self, rank: int) -> Path:
        return self.directory / f"stack{rank}"


# The caller's side.


@dataclass(frozen=True)
class _Worker:
    rank: int
    process: BaseProcess
    connection: Connection


def _located(function: Callable[..., Any]) -> tuple[str, str, str]:
    """(module, its file, qualified name) of a function."""
    name, qualified = getattr(function, "__module__", None), getattr(function, "__qualname__", "<unnamed>")
    file = getattr(sys.modules.get(name or ""), "__file__", None)
    if name is None or file is None or "<" in qualified:
        raise TypeError(f"workers cannot import {qualified}; pass a function from the top level of a module")
    return name, file, qualified


def _plain(entry: tuple[Any, ...]) -> tuple[Any, ...]:
    """A warning filter as the arguments of `warnings.filterwarnings`."""
    action, message, category, module, line = entry
    return action, getattr(message, "pattern", message) or "", category, getattr(module, "pattern", module) or "", line


@contextmanager
def _workers(task: _Task) -> Iterator[list[_Worker]]:
    """Start the workers; end them all when the block ends."""
    context = multiprocessing.get_context("forkserver")
    workers: list[_Worker] = []
    try:
        for rank in range(task.world_size):
            own_end, child_end = context.Pipe()
            process = context.Process(target=_work, args=(rank, task, child_end), name=f"rank{rank}", daemon=True)
            process.start()
            child_end.close()
            workers.append(_Worker(rank, process, own_end))
        yield workers
    finally:
        for worker in workers:
            _end(worker)


def _end(worker: _Worker) -> None:
    """End a worker and all processes that it started."""
    assert worker.process.pid is not None
    with suppress(ProcessLookupError, PermissionError):  # its process group does not exist yet, or has ended
        os.killpg(worker.process.pid, signal.SIGKILL)
    worker.process.kill()
    worker.process.join()
    worker.process.close()
    worker.connection.close()


def _gathered(workers: list[_Worker], task: _Task) -> list[Any]:
    """The results of all workers in order, or the error of the first that fails."""
    results: dict[int, Any] = {}
    deadline = time.monotonic() + task.timeout
    while missing := [worker for worker in workers if worker.rank not in results]:
        ready = _ready(missing, max(0.0, deadline - time.monotonic()))
        if not ready:
            raise TimeoutError(_explained(missing, task))
        failures = []
        for worker in ready:
            succeeded, results[worker.rank] = _received(worker)
            if not succeeded:
                failures.append(worker)
        if failures:
            raise _first(failures, [worker for worker in workers if worker.rank not in results], results)
    return [results[worker.rank] for worker in workers]


def _ready(workers: list[_Worker], seconds: float) -> list[_Worker]:
    connections = wait([worker.connection for worker in workers], seconds)
    return [worker for worker in workers if worker.connection in connections]


def _received(worker: _Worker) -> tuple[bool, Any]:
    """(whether a worker succeeded, its result or (traceback, refusal)); (False, None) for a dead worker."""
    try:
        message: tuple[bool, Any] = pickle.loads(worker.connection.recv_bytes())
        return message
    except (EOFError, ConnectionResetError):
        return False, None


def _first(failures: list[_Worker], missing: list[_Worker], results: dict[int, Any]) -> WorkerFailed:
    """The failure that caused the others: a dead rank makes its neighbours fail, but a rank that raises waits."""
    dead = [worker for worker in failures if results[worker.rank] is None]
    if not dead:
        dead = [worker for worker in _ready(missing, 0.2) if _received(worker) == (False, None)]
    if dead:
        return WorkerFailed(dead[0].rank, f"died {_how(dead[0].process)}")
    stack, refusal = results[failures[0].rank]
    return WorkerFailed(failures[0].rank, f"failed:\n{stack}", refusal)


def _how(process: BaseProcess) -> str:
    process.join()
    status = process.exitcode or 0
    return f"of {signal.Signals(-status).name}" if status < 0 else f"with status {status} and no result"


def _explained(late: list[_Worker], task: _Task) -> str:
    """The stacks of the ranks without a result."""
    writing = [worker for worker in late if task.stack_of(worker.rank).exists()]
    for worker in writing:
        assert worker.process.pid is not None
        os.kill(worker.process.pid, signal.SIGUSR1)
    deadline = time.monotonic() + STACKS
    while writing and time.monotonic() < deadline:
        time.sleep(0.01)
        writing = [w for w in writing if w.process.is_alive() and not _is_whole(task.stack_of(w.rank))]
    lines = [f"no result after {task.timeout:g} s"]
    for worker in late:
        path = task.stack_of(worker.rank)
        lines.append(f"rank {worker.rank}: {path.read_text() if path.exists() else 'not started'}")
    return "\n".join(lines)


def _is_whole(stack: Path) -> bool:
    """Whether faulthandler has written the outermost frame, or its mark for omitted frames."""
    return any(line.endswith("in <module>") or line == "  ..." for line in stack.read_text().splitlines())


# The worker's side.


def _work(rank: int, task: _Task, connection: Connection) -> None:
    """Run a rank's part of a task, and send (whether it succeeded, its result or (traceback, refusal))."""
    os.setsid()  # so that `_end` also ends the processes that it starts
    threading.Thread(target=_end_with_caller, daemon=True).start()
    with task.stack_of(rank).open("w") as stack:
        faulthandler.register(signal.SIGUSR1, stack, all_threads=False)
        try:
            message = pickle.dumps((True, _called(rank, task)))
        except BaseException as error:  # the caller reports any exception
            refused = isinstance(error, UsageError) and not isinstance(error, BrokenPlugin)
            refusal = str(error) if refused else ""
            connection.send_bytes(pickle.dumps((False, (traceback.format_exc(), refusal))))
            connection.poll(None)  # ending here would make other ranks fail too: the caller ends all of them
            raise
        connection.send_bytes(message)


def _end_with_caller() -> None:
    caller = multiprocessing.parent_process()
    assert caller is not None
    wait([caller.sentinel])
    os.killpg(0, signal.SIGKILL)


def _called(rank: int, task: _Task) -> Any:
    import torch  # already imported by the server
    import torch.distributed as dist

    from mplug_ops import CHECK  # imports torch

    torch.set_num_threads(1)
    os.environ.setdefault(CHECK, "1")  # ranks compare what they exchange as flat buffers, unless it is set otherwise
    sys.path[:] = task.path  # workers can import what the caller can
    if sys.platform in _LOOPBACK:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", _LOOPBACK[sys.platform])
    warnings.resetwarnings()
    for action, message, category, module, line in reversed(task.filters):
        warnings.filterwarnings(action, message, category, module, line)
    function = _loaded(*pickle.loads(task.function))
    arguments = pickle.loads(task.args)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{task.directory / 'store'}",
        rank=rank,
        world_size=task.world_size,
        timeout=timedelta(seconds=task.timeout + 60),  # the caller's timeout comes first, and reports the stacks
    )
    result = function(*arguments)
    dist.barrier()  # a rank that ends early closes connections from which others still read
    dist.destroy_process_group()
    return result


def _loaded(name: str, file: str, qualified: str) -> Any:
    """A function of a module. Loads the module from its file, under the name that it has in the caller."""
    found: Any = sys.modules.get(name)
    if getattr(found, "__file__", None) != file:
        found = _module(name, file)
    for part in qualified.split("."):
        found = getattr(found, part)
    return found


def _module(name: str, file: str) -> ModuleType:
    parent, _, child = name.rpartition(".")
    package = _package(parent) if parent else None
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if package is not None:
        setattr(package, child, module)
    return module


def _package(name: str) -> ModuleType:
    """A package, or an empty module in its place: a test's folder, in which pickle looks for the modules."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        return sys.modules.setdefault(name, ModuleType(name))
