"""Records which lines of a tree each test executes, in every process that the tests start.

`run.py record` installs this module and a `.pth` file that calls `boot` into the copy of an environment;
`campaign.py record` puts a `sitecustomize.py` on PYTHONPATH that calls it. Lines are then recorded in the pytest
processes, in the forkserver's children and in command-line subprocesses: by `sys.monitoring` from Python 3.12 on, which
hears of each line once a test and costs little; by coverage.py's C tracer before. Each process appends lines
`{"test": ..., "lines": {file: [line numbers]}}` to FOLDER/PID.jsonl. The pytest plugin (`plugin.py`) writes the name of
the running test to a file, which the other processes read.
"""

import atexit
import functools
import importlib.abc
import importlib.machinery
import json
import os
import sys
from collections.abc import Callable, Sequence
from functools import cache
from types import CodeType, ModuleType
from typing import Any

FOLDER, TREE, NOW = "MPLUG_RECORD", "MPLUG_RECORD_TREE", "MPLUG_RECORD_NOW"
"""Environment variables: where lines are written, whose lines are recorded, the file that names the running test."""
FILES = "files.txt"
"""The file in the folder of lines that lists the files of the tree whose lines are recorded, one in a line."""
TRACED = "MPLUG_RECORD_TRACED" in os.environ
"""Whether coverage.py records, from Python 3.12 on too."""
BETWEEN = "collection"
"""The name of what a process executes while no test runs."""
WORKER_JOBS = {"mplug_testing.workers": ("_called",)}
"""Module -> its functions that each do one job of a test in a worker process. Adapt it when the test kit changes.

A worker may live longer than a test, and it may be killed as soon as its result has arrived. The recorder therefore
asks for the test's name before each job and writes the lines before the result leaves.
"""


class _Monitored:
    """The lines that run, by `sys.monitoring`. Only code of the listed files hears of its lines, each once."""

    TOOL = 4
    """A number that neither a debugger nor coverage.py nor a profiler uses."""

    def __init__(self) -> None:
        self.files = _files()
        self.lines: dict[str, set[int]] = {}

    def start(self) -> None:
        monitoring = sys.monitoring  # type: ignore[attr-defined]
        events = monitoring.events
        if monitoring.get_tool(self.TOOL) is None:
            monitoring.use_tool_id(self.TOOL, "mplug faults")
        monitoring.register_callback(self.TOOL, events.PY_START, self._began)
        monitoring.register_callback(self.TOOL, events.LINE, self._ran)
        monitoring.set_events(self.TOOL, events.PY_START)
        monitoring.restart_events()

    def stop(self) -> None:
        monitoring = sys.monitoring  # type: ignore[attr-defined]
        monitoring.set_events(self.TOOL, 0)
        monitoring.register_callback(self.TOOL, monitoring.events.PY_START, None)
        monitoring.register_callback(self.TOOL, monitoring.events.LINE, None)

    def _began(self, code: CodeType, offset: int) -> Any:
        monitoring = sys.monitoring  # type: ignore[attr-defined]
        if code.co_filename in self.files:
            monitoring.set_local_events(self.TOOL, code, monitoring.events.LINE)
        return monitoring.DISABLE

    def _ran(self, code: CodeType, line: int) -> Any:
        if code.co_filename in self.files:
            self.lines.setdefault(code.co_filename, set()).add(line)
        return sys.monitoring.DISABLE  # type: ignore[attr-defined]

    def found(self) -> dict[str, list[int]]:
        """File -> the lines that ran."""
        return {file: sorted(numbers) for file, numbers in self.lines.items()}


class _Traced:
    """The lines that run, by coverage.py."""

    def __init__(self) -> None:
        import coverage  # once mplug's path is set up

        self.coverage = coverage.Coverage(
            data_file=None, config_file=False, check_preimported=False, include=sorted(_files()), messages=False
        )
        self.coverage._warn_no_data = False
        self.start, self.stop = self.coverage.start, self.coverage.stop

    def found(self) -> dict[str, list[int]]:
        """File -> the lines that ran."""
        data = self.coverage.get_data()
        lines = {file: sorted(data.lines(file) or ()) for file in data.measured_files()}
        return {file: numbers for file, numbers in lines.items() if numbers}


class _State:
    recording: _Monitored | _Traced | None = None
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
    if _State.recording is None or _State.busy:
        return
    _State.busy = True
    try:
        if lines := _State.recording.found():
            with open(os.path.join(os.environ[FOLDER], f"{os.getpid()}.jsonl"), "a") as out:
                out.write(json.dumps({"test": _State.test, "lines": lines}) + "\n")
        _begin(_State.test if following is None else following)
    finally:
        _State.busy = False


def _finish() -> None:
    """Write for the last time. An interpreter that shuts down must not be traced: coverage.py's modules go first."""
    write()
    if _State.recording is not None:
        _State.recording.stop()
        _State.recording = None


def _begin(test: str) -> None:
    if _State.recording is not None:
        _State.recording.stop()
    _State.recording = _Monitored() if sys.version_info >= (3, 12) and not TRACED else _Traced()
    _State.recording.start()
    _State.test = test


@cache
def _files() -> frozenset[str]:
    with open(os.path.join(os.environ[FOLDER], FILES)) as file:
        return frozenset(os.path.join(os.environ[TREE], name) for name in file.read().splitlines())


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
