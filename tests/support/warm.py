"""Python modules in processes of their own that do not import torch again: forks of the server of `run_workers`.

`python -m mplug` spends seconds in `import torch`. `run_module` starts a process that has torch and the host imported,
and is otherwise like `subprocess.run([sys.executable, "-m", module, *arguments])`: a working directory, an environment,
standard output and error of its own, and an exit status. Tests about start-up or about the end of the interpreter
start a new interpreter instead.
"""

import importlib
import io
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from multiprocessing import forkserver, resource_tracker, util
from pathlib import Path
from typing import Any

from machines import enter

from mplug_testing.workers import LAST, PRELOAD

SEARCHED = [path for path in sys.path if path and Path(path) != Path(sys.executable).parent]
"""Where an interpreter of this environment looks for modules, before a test adds folders."""

STRICT = ("-W", "error", "-W", "ignore::pytest.PytestAssertRewriteWarning")
"""Options of pytest: a warning is an error, except that a fork has imported pytest's plugins already."""


class Forked:
    """A running module, with the methods of `subprocess.Popen` that the tests use.

    `text` is its standard input. With `session` it leads a session of its own. `machine` is the `pid` of a machine of
    `machines.Machines` on which it runs.
    """

    def __init__(
        self,
        module: str,
        *arguments: str,
        cwd: Path,
        environment: Mapping[str, str],
        text: str | None = None,
        session: bool = False,
        machine: int | None = None,
    ) -> None:
        multiprocessing.set_forkserver_preload([*PRELOAD, LAST])
        self.args = [module, *arguments]
        self.returncode: int | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="mplug-warm-")
        self._written = [Path(self._folder.name, name) for name in ("out", "err")]
        out, err = map(str, self._written)
        self.output = out
        task = {"words": self.args, "cwd": str(cwd), "environment": dict(environment), "searched": SEARCHED}
        here = {"TASK": {**task, "text": text, "session": session, "machine": machine, "out": out, "err": err}}
        context = multiprocessing.get_context("forkserver")
        self._process = context.Process(target=runpy.run_path, args=(__file__, here, "mplug_warm"))
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        """Its exit status, or None while it runs. A negative status is the number of a signal."""
        if self.returncode is None:
            self.returncode = self._process.exitcode
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        self._process.join(timeout)
        if self.poll() is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        out, err = (path.read_text() if path.exists() else "" for path in self._written)
        self._folder.cleanup()
        return out, err


def run_module(
    module: str,
    *arguments: str,
    cwd: Path,
    environment: Mapping[str, str],
    timeout: float | None = 600,
    text: str | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a module as `__main__` in a process of its own, and return its exit status, its output and its errors."""
    process = Forked(module, *arguments, cwd=cwd, environment=environment, text=text)
    try:
        out, err = process.communicate(timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise
    return subprocess.CompletedProcess(process.args, process.returncode or 0, out, err)


def become(task: Mapping[str, Any]) -> None:
    """Be the process of a task, from its working directory to its exit status."""
    if task["session"]:
        os.setsid()
    for number, path in ((1, task["out"]), (2, task["err"])):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)
    if task["machine"] is not None:
        enter(task["machine"])
    if task["text"] is not None:
        sys.stdin = io.StringIO(task["text"])
    os.chdir(task["cwd"])
    os.environ.clear()
    os.environ.update(task["environment"])
    added = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = dict.fromkeys([task["cwd"], *added, *task["searched"]])
    importlib.invalidate_caches()
    start_server()
    subprocess.run = forking_modules(subprocess.run)
    module, *arguments = task["words"]
    sys.argv[1:] = arguments
    sys.modules.pop(module if "." in module else f"{module}.__main__", None)  # it runs as `__main__` instead
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    finally:
        util._exit_function()
        os.close(forkserver._forkserver._forkserver_alive_fd)
        os.waitpid(forkserver._forkserver._forkserver_pid, 0)  # nothing of this process outlives it unseen


def start_server() -> None:
    def fork(path: bytes, arguments: list[str], passed: list[int]) -> int:
        pid = os.fork()
        if pid == 0:
            try:
                begin = 3
                for number in sorted(passed):
                    os.closerange(begin, number)
                    begin = number + 1
                os.closerange(begin, os.sysconf("SC_OPEN_MAX"))
                forkserver._forkserver._lock = threading.Lock()  # held by the caller, which is another process now
                resource_tracker._resource_tracker._fd = None
                exec(arguments[-1], {})
            finally:
                os._exit(0)
        return pid

    resource_tracker.ensure_running()
    spawn, util.spawnv_passfds = util.spawnv_passfds, fork
    forkserver.ensure_running()
    util.spawnv_passfds = spawn


def forking_modules(run: Callable[..., Any]) -> Callable[..., Any]:
    """Make the subprocesses of commands, such as `python -m mplug_testing.inspection`, forks too."""

    def fork(command: list[str], **options: Any) -> Any:
        if command[:2] != [sys.executable, "-m"] or not command[2].startswith("mplug"):
            return run(command, **options)
        assert set(options) <= {"input", "capture_output", "text", "timeout", "cwd", "env"}
        timeout, text = options.get("timeout"), options.get("input")
        here, environment = Path(options.get("cwd") or Path.cwd()), options.get("env") or os.environ
        return run_module(*command[2:], cwd=here, environment=environment, timeout=timeout, text=text)

    return fork


if __name__ == "mplug_warm":
    become(TASK)  # type: ignore[name-defined]  # noqa: F821  # what `run_module` passes
