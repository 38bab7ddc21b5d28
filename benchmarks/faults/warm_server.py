"""A process that has torch and pytest imported, and forks a pytest session for each request.

`slots.py` starts it in a copy of a tree. A request is a line of JSON on standard input: pytest's arguments, variables
of the environment, and the file for the output. It is answered by two lines: the session's process, and later its exit
status. Nothing of the tree is imported before a fork, so each session imports the sources as they are then.

Tests start workers from a forkserver of multiprocessing, which would import torch again. So each session forks its
forkserver from itself before it imports any test; that one imports nothing until its first worker is needed.
"""

import ctypes
import faulthandler
import importlib
import json
import os
import select
import signal
import sys
import threading
import types
import warnings
from contextlib import suppress
from typing import Any

PRELOADED = (
    *("torch", "torch.distributed", "torch._dynamo", "torch._inductor.config", "torch.onnx", "torch.profiler"),
    *("torch.distributed.checkpoint", "torch.distributed.elastic.multiprocessing", "torch.testing", "torch.utils.data"),
    *("numpy", "pydantic", "yaml", "rich.console", "click", "pluggy", "psutil", "safetensors.torch"),
    *("pytest", "_pytest.pytester", "hypothesis", "hypothesis.strategies", "xdist", "transformers"),
)
"""Modules of other projects that sessions find imported; those that are not installed are skipped."""
ANSWERS = 1
PR_SET_PDEATHSIG = 1


def main() -> None:
    """Serve until standard input ends."""
    _end_with_parent()
    answers = os.fdopen(os.dup(ANSWERS), "w")
    os.dup2(2, ANSWERS)  # what imports print
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in PRELOADED:
            with suppress(ImportError):
                importlib.import_module(name)
    print(json.dumps({"ready": threading.active_count()}), file=answers, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        pid = _forked()
        if pid == 0:
            answers.close()
            _session(request)
        print(json.dumps({"pid": pid}), file=answers, flush=True)
        _, status = os.waitpid(pid, 0)
        print(json.dumps({"status": os.waitstatus_to_exitcode(status)}), file=answers, flush=True)


def _end_with_parent() -> None:
    """Be killed when the process (on Linux, the thread) that started this one ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _session(request: dict[str, Any]) -> None:
    """Run pytest in this process, which leads a session of its own, and leave."""
    os.setsid()
    _end_with_parent()
    nothing = os.open(os.devnull, os.O_RDONLY)
    output = os.open(request["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for number, file in ((0, nothing), (1, output), (2, output)):
        os.dup2(file, number)
    sys.stdin = os.fdopen(os.dup(0))
    os.chdir(request["folder"])
    os.environ.update(request["environment"])
    sys.modules["__main__"] = types.ModuleType("__main__")  # workers would import this file
    sys.path[:] = [path for path in sys.path if path != os.path.dirname(os.path.abspath(__file__))]
    sys.argv = ["pytest", *request["arguments"]]
    status = 3
    try:
        import pytest

        status = int(pytest.main(request["arguments"], plugins=[_ForkedServer()]))
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 1
    finally:
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def _silence(kept: set[int]) -> None:
    """Let all files but the kept ones be /dev/null. Closed, their numbers would be those of files opened later.

    pytest's capture and handlers of loggers still write to them.
    """
    nothing = os.open(os.devnull, os.O_RDWR)
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            os.fstat(int(name))  # the one that listed the folder is closed
            if int(name) > 2 and int(name) not in kept | {nothing}:
                os.dup2(nothing, int(name))


class _ForkedServer:
    """Forks multiprocessing's forkserver when a session begins, after its conftest.py is imported."""

    def pytest_sessionstart(self) -> None:
        import multiprocessing
        from multiprocessing import forkserver, resource_tracker, util

        from mplug_testing.workers import LAST, PRELOAD

        multiprocessing.set_forkserver_preload([*PRELOAD, LAST])
        resource_tracker.ensure_running()
        spawn, util.spawnv_passfds = util.spawnv_passfds, _fork  # type: ignore[assignment]
        try:
            forkserver.ensure_running()
        finally:
            util.spawnv_passfds = spawn


def _forked() -> int:
    """Fork. Python 3.12 warns of threads, which libraries keep for computations that none of the forks continues."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return os.fork()


def _fork(path: bytes, arguments: list[str], passed: list[int]) -> int:
    """Like `spawnv_passfds`, but a fork, which begins to work when someone connects to the first passed file."""
    pid = _forked()
    if pid:
        return pid
    try:
        from multiprocessing import forkserver, resource_tracker

        _silence(set(passed))
        for name, number in (("stdin", 0), ("stdout", 1), ("stderr", 2)):  # pytest's capture has replaced them
            setattr(sys, name, os.fdopen(number, "r" if number == 0 else "w", closefd=False))
        faulthandler.disable()  # it would write to a file that is closed
        listener, alive = passed[:2]
        ready, _, _ = select.select([listener, alive], [], [])
        if listener in ready:
            forkserver._forkserver._lock = threading.Lock()  # held by the process that forks
            resource_tracker._resource_tracker._fd = None
            exec(arguments[-1], {})
    finally:
        os._exit(0)


if __name__ == "__main__":
    main()
