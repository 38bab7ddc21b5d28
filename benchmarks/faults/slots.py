"""Slots: private copies of a tree, each with a warm process that forks pytest sessions.

A slot needs no environment inside the tree: the sources of the copy come first on PYTHONPATH, before an interpreter's
own packages, in which the metadata of mplug and its plugins must be installed (an editable install of another checkout
will do). Linux only.
"""

import itertools
import json
import math
import os
import secrets
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from workspace import HERE, MARK, Outcome, left_out, outcome_of

REWRITE, FORK = "ignore::pytest.PytestAssertRewriteWarning", "ignore:.*fork.*:DeprecationWarning"
IGNORED = ("-W", REWRITE, "-W", FORK)
"""The warm process has imported pytest's plugins already; Python 3.12 warns of forks beside threads."""
FIRST = 60.0
"""Seconds until a session must have begun its first test, beside the patience for a test."""


class Stopped(Exception):
    """The time of the whole campaign is over."""


def sources_of(copy: Path) -> list[Path]:
    """The folders of a copy that contain packages: the host's, those of other distributions, and those of plugins."""
    return [
        copy,
        *sorted(copy.glob("*/src")),
        *sorted(copy.glob("plugins/*/*/src")),
        *sorted(copy.glob("release/*/src")),
    ]


def environment_of(copy: Path, paths: Sequence[str] = ()) -> dict[str, str]:
    """The environment in which the sources of a copy are imported. No GPU is seen: other sessions run beside this."""
    sources = [*map(str, sources_of(copy)), *paths]
    inherited = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("MPLUG_", "PYTEST_", "COV_"))}
    kept |= {"PYTHONPATH": os.pathsep.join([*sources, *inherited]), "CUDA_VISIBLE_DEVICES": ""}
    return kept | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


def copied(tree: Path, folder: Path) -> Path:
    """A copy of a tree's sources in a folder; it has no environment and no repository."""
    return Path(shutil.copytree(tree, folder / "tree", symlinks=True, ignore=left_out(tree)))


def verify(python: str, copy: Path) -> None:
    """Exit with a message unless an interpreter finds mplug's metadata, and imports every package from the copy."""
    packages = ["mplug", *(path.name for one in sources_of(copy)[1:] for path in one.glob("mplug_*") if path.is_dir())]
    script = (
        "import importlib.metadata, importlib.util, json, sys\n"
        "importlib.metadata.version('mplug')\n"
        "found = [importlib.util.find_spec(name) for name in json.loads(sys.argv[1])]\n"
        "print(json.dumps([spec and spec.origin for spec in found]))"
    )
    command = [python, "-c", script, json.dumps(packages)]
    done = subprocess.run(command, cwd="/", env=environment_of(copy), capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"'{python}' does not find mplug and its metadata:\n{done.stderr[-2000:]}")
    for name, origin in zip(packages, json.loads(done.stdout.splitlines()[-1]), strict=True):
        if origin is None or not origin.startswith(f"{copy}/"):
            sys.exit(f"'{name}' would be imported from '{origin}', not from the copy '{copy}'")


class Slot:
    """A copy of `tree` in `folder`, in which one mutant at a time is planted and tested."""

    def __init__(self, tree: Path, folder: Path, python: str = sys.executable, stop_at: float = math.inf) -> None:
        folder.mkdir(parents=True)
        self.copy, self.folder, self.stop_at = copied(tree, folder), folder, stop_at
        boot = folder / "boot"
        boot.mkdir()
        shutil.copy(HERE / "plugin.py", boot / "mplug_faults_plugin.py")
        self.token = secrets.token_hex(8)
        self._clock = itertools.count(int(time.time()), 2)
        with (folder / "server.txt").open("w") as errors:
            self._server = subprocess.Popen(
                [python, str(HERE / "warm_server.py")],
                cwd=self.copy,
                env=environment_of(self.copy, [str(boot)]) | {MARK: self.token},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,
            )
        self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._server.stdout is not None
        line = self._server.stdout.readline()
        if not line:
            raise RuntimeError(f"the warm process has ended:\n{(self.folder / 'server.txt').read_text()[-2000:]}")
        return dict(json.loads(line))

    def put(self, file: str, source: bytes) -> None:
        """Write a source with a modification time of its own: compiled files of other versions are then stale."""
        path = self.copy / file
        path.write_bytes(source)
        moment = next(self._clock)
        os.utime(path, (moment, moment))

    def pytest(self, *arguments: str, patience: float = math.inf) -> Outcome:
        """Run pytest in the copy; it is ended if no test begins or ends for `patience` seconds.

        Raises Stopped at `stop_at`. No process of it outlives the call.
        """
        report, output = self.folder / "report.jsonl", self.folder / "output.txt"
        report.unlink(missing_ok=True)
        fixed = ("-p", "mplug_faults_plugin", "-p", "no:cacheprovider", f"--basetemp={self.folder / 'tests'}", *IGNORED)
        request = {
            "arguments": [*fixed, *arguments],
            "environment": {"MPLUG_FAULTS_REPORT": str(report)},
            "folder": str(self.copy),
            "output": str(output),
        }
        assert self._server.stdin is not None
        self._server.stdin.write(json.dumps(request) + "\n")
        self._server.stdin.flush()
        pid = self._answer()["pid"]
        ended = threading.Event()
        status: list[int] = []

        def wait() -> None:
            with suppress(RuntimeError):
                status.append(self._answer()["status"])
            ended.set()

        threading.Thread(target=wait, daemon=True).start()
        in_time = self._watched(ended, report, patience)
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        ended.wait()
        self._end_left_behind()
        if not in_time and time.monotonic() >= self.stop_at:
            raise Stopped
        text = output.read_text(errors="replace") if output.exists() else ""
        return outcome_of(status[0] if in_time and status else None, report, text)

    def _watched(self, ended: threading.Event, report: Path, patience: float) -> bool:
        """Whether a session ends by itself."""
        size, since, allowed = 0, time.monotonic(), patience + FIRST
        while not ended.wait(0.05):
            now = time.monotonic()
            if now - since > allowed or now >= self.stop_at:
                return False
            if report.exists() and report.stat().st_size > size:
                size, since, allowed = report.stat().st_size, now, patience
        return True

    def _end_left_behind(self) -> None:
        """End all processes that a session has started: their environment holds this slot's mark."""
        mark = f"{MARK}={self.token}".encode()
        for path in Path("/proc").glob("[0-9]*"):
            if int(path.name) == self._server.pid:
                continue
            with suppress(OSError):
                if mark in (path / "environ").read_bytes().split(b"\0"):
                    os.kill(int(path.name), signal.SIGKILL)

    def close(self) -> None:
        """End the warm process and all that is left of its sessions."""
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        with suppress(BrokenPipeError):
            self._server.stdin.close()
        with suppress(ProcessLookupError):
            os.killpg(self._server.pid, signal.SIGKILL)
        self._server.wait()
        self._server.stdout.close()
        self._end_left_behind()
        shutil.rmtree(self.folder, ignore_errors=True)
