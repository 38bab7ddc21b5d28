"""Records which lines of a tree each test executes, in every process that the tests start.

`run.py record` installs this module and a `.pth` file that calls `boot` into the copy of an environment. coverage.py's
C tracer then runs in the pytest processes, in the forkserver's children and in command-line subprocesses. Each process
appends lines `{"test": ..., "lines": {file: [line numbers]}}` to FOLDER/PID.jsonl. The pytest plugin (`plugin.py`)
writes the name of the running test to a file, which the other processes read.
"""

import atexit
import functools
import importlib.abc
import importlib.machinery
import json
import os
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

FOLDER, TREE, NOW = "MPLUG_RECORD", "MPLUG_RECORD_TREE", "MPLUG_RECORD_NOW"
"""Environment variables: where lines are written, whose lines are recorded, the file that names the running test."""
BETWEEN = "collection"
"""The name of what a process executes while no test runs."""
WORKER_JOBS = {"mplug.testing.workers": ("_called",)}
"""Module -> its functions that each do one job of a test in a worker process. Adapt it when the test kit changes.

A worker may live longer than a test, and it may be killed as soon as its result has arrived. The recorder therefore
asks for the test's name before each job and writes the lines before the result leaves.
"""


class _State:
    coverage: Any = None
    test = BETWEEN
    busy = False


def boot() -> None:
    """Record this process and every process that it forks. Called once, by the `.pth` file."""
    _begin(_running_test())
    atexit.register(_finish)
    leave = os._exit

    def write_and_leave(status: int) -> None:
        try:
            _finish()
        finally:
            leave(status)

    os._exit = write_and_leave  # multiprocessing's children leave so, without atexit
    os.register_at_fork(after_in_child=lambda: _begin(_running_test()))
    sys.meta_path.insert(0, _WorkerJobs())


def write(following: str | None = None) -> None:
    """Write the lines since the last call under the current test's name; then record for the `following` test."""
    if _State.coverage is None or _State.busy:
        return
    _State.busy = True
    try:
        data = _State.coverage.get_data()
        lines = {file: sorted(data.lines(file) or ()) for file in data.measured_files()}
        lines = {file: numbers for file, numbers in lines.items() if numbers}
        if lines:
            with open(os.path.join(os.environ[FOLDER], f"{os.getpid()}.jsonl"), "a") as out:
                out.write(json.dumps({"test": _State.test, "lines": lines}) + "\n")
        _begin(_State.test if following is None else following)
    finally:
        _State.busy = False


def _finish() -> None:
    """Write for the last time. An interpreter that shuts down must not be traced: coverage.py's modules go first."""
    write()
    if _State.coverage is not None:
        _State.coverage.stop()
        _State.coverage = None


def _begin(test: str) -> None:
    import coverage  # once mplug's path is set up

    if _State.coverage is not None:
        _State.coverage.stop()
    tree = os.environ[TREE]
    _State.coverage = coverage.Coverage(
        data_file=None,
        config_file=False,
        check_preimported=False,
        include=[f"{tree}/mplug/*", f"{tree}/plugins/*/*/src/*"],
        messages=False,
    )
    _State.coverage._warn_no_data = False
    _State.coverage.start()
    _State.test = test


def _running_test() -> str:
    try:
        with open(os.environ[NOW]) as file:
            return file.read() or BETWEEN
    except (KeyError, OSError):
        return BETWEEN


class _WorkerJobs(importlib.abc.MetaPathFinder):
    """Wraps the functions of `WORKER_JOBS` when their module is imported."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The spec of the plain path finder, whose loader wraps the functions after it has executed the module."""
        if fullname not in WORKER_JOBS:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_wrap(module: ModuleType) -> None:
            execute(module)
            for name in WORKER_JOBS[fullname]:
                setattr(module, name, _recorded(getattr(module, name)))

        spec.loader.exec_module = execute_and_wrap  # type: ignore[method-assign]
        return spec


def _recorded(job: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(job)
    def recorded(*arguments: Any, **named: Any) -> Any:
        write(_running_test())
        try:
            return job(*arguments, **named)
        finally:
            write()

    return recorded
