"""The harness that runs a test's function on several ranks."""

import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from mplug import UsageError
from mplug_testing import WorkerFailed, run_workers, workers


@dataclass
class Point:
    """A class that only this file has."""

    x: Tensor


def added_up(point: Point) -> Point:
    total = point.x + dist.get_rank()
    dist.all_reduce(total)
    return Point(total)


def facts() -> tuple[tuple[int, int, int, str, str], int, int]:
    place = (dist.get_rank(), dist.get_world_size(), torch.get_num_threads(), dist.get_backend())
    return (*place, os.environ.get("MARK", "")), os.getpid(), os.getppid()


def marked() -> int:
    os.environ["MARK"] = torch.marked = "by an earlier call"
    return os.getpid()


def fail(rank: int) -> None:
    raise ZeroDivisionError(f"by zero on {rank}")


def refuse(rank: int) -> None:
    raise UsageError(f"not on {rank}")


def die(_: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def leave(_: int) -> None:
    os._exit(3)


def on_rank(rank: int, end: Callable[[int], None]) -> None:
    if dist.get_rank() == rank:
        end(rank)
    dist.barrier()  # never passed: the others wait


def hang(folder: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    (folder / f"{dist.get_rank()}").write_text(f"{os.getpid()} {child.pid}")
    if dist.get_rank() == 1:
        wait_for_ever(folder)


def wait_for_ever(folder: Path) -> None:
    (folder / "waiting").write_text("1")
    while True:
        time.sleep(0.1)


def warn() -> None:
    warnings.warn("mind the gap", stacklevel=1)


def unpicklable() -> object:
    return lambda: None


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat")  # a zombie is a process that its parent has not noticed yet
    return not (stat.exists() and stat.read_text().rpartition(")")[2].split()[0] == "Z")


def within(seconds: float, condition: Callable[[], bool]) -> bool:
    """Wait until a condition is true; False if it is not in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def gone(pids: list[int]) -> bool:
    return within(120, lambda: not any(map(alive, pids)))


def test_each_call_has_fresh_processes_of_one_thread_under_gloo_in_the_order_of_ranks() -> None:
    earlier = run_workers(2, marked)
    for size in (1, 2, 4):
        places, pids, parents = zip(*run_workers(size, facts), strict=True)
        assert places == tuple((rank, size, 1, "gloo", "") for rank in range(size))
        assert len({*pids, *earlier, os.getpid()}) == size + 3
        server = forkserver._forkserver._forkserver_pid
        assert server is not None
        assert set(parents) == {server}
    if sys.platform == "linux":
        assert "libtorch_cpu" in Path(f"/proc/{server}/maps").read_text(), "the server has loaded torch already"


def test_arguments_and_results_of_a_test_files_own_classes_travel_by_value() -> None:
    point = Point(torch.tensor([1.0, 10.0]))
    results = run_workers(2, added_up, point)
    assert [type(result) for result in results] == [Point, Point]
    for result in results:
        assert result.x.tolist() == [3.0, 21.0]
    assert point.x.tolist() == [1.0, 10.0]


@pytest.mark.parametrize(
    ("rank", "end", "reason", "refusal"),
    [
        (0, fail, r"(?s)rank 0 failed:\n.*in fail\n.*by zero on 0", ""),
        (1, fail, r"(?s)rank 1 failed:\n.*in fail\n.*by zero on 1", ""),
        (1, refuse, r"rank 1 failed", "not on 1"),
        (1, die, r"rank 1 died of SIGKILL", ""),
        (1, leave, r"rank 1 died with status 3 and no result", ""),
    ],
)
def test_the_rank_that_fails_is_named_with_its_traceback_its_refusal_or_its_death(
    rank: int, end: Callable[[int], None], reason: str, refusal: str
) -> None:
    with pytest.raises(WorkerFailed, match=reason) as failed:
        run_workers(2, on_rank, rank, end)
    assert (failed.value.rank, failed.value.refusal) == (rank, refusal)


def test_a_timeout_shows_where_the_ranks_stand_and_leaves_neither_them_nor_their_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths, ready = [tmp_path / name for name in ("0", "1", "waiting")], workers._ready

    def once_begun(missing: list[Any], seconds: float) -> list[Any]:
        """The timeout begins when all processes have started, however long that takes."""
        assert within(240, lambda: all(path.exists() and path.read_text() for path in paths))
        return ready(missing, seconds)

    monkeypatch.setattr(workers, "_ready", once_begun)
    with pytest.raises(TimeoutError, match=r"(?s)no result after 0\.1 s\n.*rank 1: .*in wait_for_ever"):
        run_workers(2, hang, tmp_path, timeout=0.1)
    assert gone([int(pid) for path in paths[:2] for pid in path.read_text().split()])


CALLER = """
import os, sys, time
from pathlib import Path
import torch.distributed as dist
from mplug_testing import run_workers, workers
workers.PRELOAD.clear()
def hang(folder):
    (folder / f"{dist.get_rank()}.pid").write_text(str(os.getpid()))
    time.sleep(600)
if __name__ == "__main__":
    run_workers(2, hang, Path(sys.argv[1]))
"""


def test_no_worker_outlives_its_caller(tmp_path: Path) -> None:
    script = tmp_path / "caller.py"
    script.write_text(CALLER)
    caller = subprocess.Popen([sys.executable, str(script), str(tmp_path)], start_new_session=True)
    paths = [tmp_path / f"{rank}.pid" for rank in range(2)]
    begun = within(240, lambda: all(path.exists() and path.read_text() for path in paths))
    caller.kill()
    caller.wait()
    assert begun
    assert gone([int(path.read_text()) for path in paths])


def test_the_callers_warning_filters_hold_in_the_workers() -> None:
    with pytest.raises(WorkerFailed, match="UserWarning: mind the gap"):
        run_workers(1, warn)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "mind the")
        run_workers(1, warn)


def test_a_function_that_workers_cannot_find_and_a_result_that_cannot_travel_are_errors() -> None:
    with pytest.raises(WorkerFailed, match=r"(?s)rank 0 failed:.*[Pp]ickle"):
        run_workers(1, unpicklable)
    with pytest.raises(TypeError, match="from the top level of a module"):
        run_workers(1, lambda: None)
