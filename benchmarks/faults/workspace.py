"""A copy of a tree with an environment of its own, in which faults are planted and tests run.

The copy's environment takes no space: it links to the packages of the tree's `.venv`, and only what names the tree (the
`.pth` files and metadata of editable installs, the scripts' first lines) is rewritten. Every process that the copy's
interpreter starts therefore imports the copy's sources. The tree's own files are never written to; Python may cache
compiled modules of other packages in its environment.
"""

import ast
import hashlib
import importlib.util
import itertools
import json
import math
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

HERE = Path(__file__).parent
OUTSIDE = (".git", ".venv", "runs", ".pytest_cache", ".hypothesis", ".mypy_cache", ".ruff_cache")
MARK = "MPLUG_FAULTS_PROCESS"
"""The environment variable by which processes that a copy's tests have left behind are found."""


@dataclass(frozen=True)
class Recorded:
    """What `record` has written: tests, their seconds, which of them failed, and the lines that each executes."""

    tests: list[str]
    seconds: list[float]
    failed: frozenset[str]
    files: dict[str, Any]

    @classmethod
    def read(cls, path: Path) -> Self:
        """From a file."""
        held = json.loads(path.read_text())
        return cls(held["tests"], held["seconds"], frozenset(held["failed"]), held["files"])


@dataclass(frozen=True)
class Outcome:
    """What a pytest session has shown: its exit status (None: it was ended), and its output.

    `failed` are tests that failed, `unfinished` those that began and did not end, `seconds` the durations of tests.
    """

    status: int | None
    failed: tuple[str, ...]
    unfinished: tuple[str, ...]
    seconds: dict[str, float]
    output: str


class Workspace:
    """A copy of `tree` in `folder`."""

    def __init__(self, tree: Path, folder: Path, recorded: bool = False) -> None:
        self.tree, self.copy, self.folder = tree, folder / "tree", folder
        self.token = secrets.token_hex(8)
        self._clock = itertools.count(int(time.time()), 2)
        shutil.copytree(tree, self.copy, symlinks=True, ignore=left_out(tree))
        self._copy_environment()
        _link(HERE / "plugin.py", self.site / "mplug_faults_plugin.py")
        if recorded:
            self._install_recorder()
        self._verify()

    @property
    def python(self) -> Path:
        """The copy's interpreter."""
        return self.copy / ".venv" / "bin" / "python"

    @property
    def site(self) -> Path:
        """The copy's site-packages."""
        return next((self.copy / ".venv" / "lib").glob("python*/site-packages"))

    def _copy_environment(self) -> None:
        """Link to everything in the tree's `.venv` but for files that name the tree, which are rewritten."""
        old, new = self.tree / ".venv", self.copy / ".venv"
        (site,) = (old / "lib").glob("python*/site-packages")
        own = new / site.relative_to(old)
        own.mkdir(parents=True)
        (new / "bin").mkdir()
        self._rewrite(old / "pyvenv.cfg", new / "pyvenv.cfg")
        for path in (old / "bin").iterdir():
            target = new / "bin" / path.name
            if path.is_symlink():
                target.symlink_to(os.readlink(path))
            elif path.is_file() and path.read_bytes()[:2] == b"#!":
                self._rewrite(path, target)
            elif path.is_file():
                _link(path, target)
        for path in site.iterdir():
            origin = path / "direct_url.json"
            if path.suffix == ".pth":
                self._rewrite(path, own / path.name)
            elif path.suffix == ".dist-info" and origin.is_file() and str(self.tree) in origin.read_text():
                shutil.copytree(path, own / path.name)
                self._rewrite(origin, own / path.name / origin.name)
            elif path.name != "__pycache__":
                _link(path, own / path.name)

    def _rewrite(self, path: Path, target: Path) -> None:
        target.write_text(path.read_text().replace(str(self.tree), str(self.copy)))
        shutil.copymode(path, target)

    def _install_recorder(self) -> None:
        """The recorder, and coverage.py from the environment of this script if the tree's has none."""
        _link(HERE / "recorder.py", self.site / "mplug_faults_recorder.py")
        boot = "import os; 'MPLUG_RECORD' in os.environ and __import__('mplug_faults_recorder').boot()\n"
        (self.site / "mplug_faults.pth").write_text(boot)
        if not (self.site / "coverage").exists():
            found = importlib.util.find_spec("coverage")
            if found is None or found.origin is None:
                sys.exit("the recorder needs coverage.py in the environment of this script: pip install coverage")
            _link(Path(found.origin).parent, self.site / "coverage")

    def _verify(self) -> None:
        """Every package of the tree is imported from the copy."""
        packages = ["mplug", *(path.name for path in self.copy.glob("plugins/*/*/src/*") if path.is_dir())]
        script = (
            "import importlib.util, json, sys\n"
            "found = [importlib.util.find_spec(name) for name in json.loads(sys.argv[1])]\n"
            "print(json.dumps([spec and spec.origin for spec in found]))"
        )
        command = [str(self.python), "-c", script, json.dumps(packages)]
        environment = {key: value for key, value in os.environ.items() if not key.startswith("MPLUG_")}
        output = subprocess.run(command, cwd="/", env=environment, capture_output=True, text=True, check=True).stdout
        origins = json.loads(output)
        for name, origin in zip(packages, origins, strict=True):
            if origin is not None and not origin.startswith(f"{self.copy}/"):
                sys.exit(f"'{name}' would be imported from '{origin}', not from the copy '{self.copy}'")

    @contextmanager
    def planted(self, file: str, old: str, new: str) -> Iterator[None]:
        """Replace a text of a file of the copy in the block."""
        path = self.copy / file
        text = path.read_text()
        if text.count(old) != 1:
            sys.exit(f"'{file}' has the text {old!r} {text.count(old)} times, not once")
        try:
            self._put(path, text.replace(old, new))
            yield
        finally:
            self._put(path, text)

    def _put(self, path: Path, text: str) -> None:
        """Write a source with a modification time of its own: compiled files of other versions are then stale."""
        path.write_text(text)
        moment = next(self._clock)
        os.utime(path, (moment, moment))

    def pytest(self, *arguments: str, patience: float = math.inf, environment: dict[str, str] | None = None) -> Outcome:
        """Run pytest in the copy; it is ended if no test begins or ends for `patience` seconds.

        No process of it outlives the call.
        """
        report, output = self.folder / "report.jsonl", self.folder / "output.txt"
        report.unlink(missing_ok=True)
        fixed = ("-p", "mplug_faults_plugin", "-p", "no:cacheprovider")
        command = [str(self.python.with_name("pytest")), *fixed, f"--basetemp={self.folder / 'tests'}", *arguments]
        variables = {**os.environ, **(environment or {}), "MPLUG_FAULTS_REPORT": str(report), MARK: self.token}
        variables.pop("PYTHONPATH", None)
        with output.open("w") as out:
            process = subprocess.Popen(
                command, cwd=self.copy, env=variables, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
            )
            try:
                status = _waited(process, report, patience)
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                self._end_left_behind()
        return outcome_of(status, report, output.read_text(errors="replace"))

    def _end_left_behind(self) -> None:
        """End processes that tests have started in sessions of their own: their environment holds this copy's mark."""
        mark = f"{MARK}={self.token}".encode()
        for path in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if mark in (path / "environ").read_bytes().split(b"\0"):
                    os.kill(int(path.name), signal.SIGKILL)


@contextmanager
def workspace(tree: Path, recorded: bool = False) -> Iterator[Workspace]:
    """A copy of a tree in a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="faults-", ignore_cleanup_errors=True) as folder:
        yield Workspace(tree, Path(folder).resolve(), recorded)


def digest(path: Path) -> str:
    """A hash of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


@dataclass(frozen=True)
class Place:
    """The lines of the statements that a text touches, and whether they run when the module is imported."""

    lines: frozenset[int]
    at_import: bool


def place_of(source: str, text: str) -> Place:
    """Where a text stands that occurs once in a source."""
    first = source[: source.index(text)].count("\n") + 1
    last = first + text.rstrip("\n").count("\n")
    lines, at_import = set[int](), True

    def visit(node: ast.AST, inside: bool) -> None:
        nonlocal at_import
        for child in ast.iter_child_nodes(node):
            visit(child, inside or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda))
        if isinstance(node, ast.stmt | ast.ExceptHandler):
            own = _own_lines(node)
            if own.intersection(range(first, last + 1)):
                lines.update(own)
                at_import &= not inside

    visit(ast.parse(source), False)
    return Place(frozenset(lines), at_import)


def function_lines(source: str) -> frozenset[int]:
    """The lines of all statements inside functions."""
    nodes = ast.walk(ast.parse(source))
    functions = (node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    bodies = [statement for function in functions for statement in function.body]
    return frozenset(line for body in bodies for line in range(body.lineno, (body.end_lineno or body.lineno) + 1))


def _own_lines(node: ast.stmt | ast.ExceptHandler) -> set[int]:
    """The lines of a statement; of a compound one, its header's."""
    body: Any = getattr(node, "body", None)
    end = (node.end_lineno or node.lineno) if not body else max(node.lineno, body[0].lineno - 1)
    return set(range(node.lineno, end + 1))


def _waited(process: "subprocess.Popen[bytes]", report: Path, patience: float) -> int | None:
    """The exit status of a process; None if its report does not grow for `patience` seconds."""
    size, since = 0, time.monotonic()
    while time.monotonic() - since < patience:
        with suppress(subprocess.TimeoutExpired):
            return process.wait(0.2)
        if report.exists() and report.stat().st_size > size:
            size, since = report.stat().st_size, time.monotonic()
    return None


def outcome_of(status: int | None, report: Path, output: str) -> Outcome:
    """The outcome of a session with an exit status, from the report of its tests and its output."""
    facts = list(whole_lines(report)) if report.exists() else []
    seconds = dict[str, float]()
    for fact in facts:
        if fact["outcome"] not in ("started", "finished"):
            seconds[fact["test"]] = seconds.get(fact["test"], 0.0) + fact["seconds"]
    by = {
        outcome: tuple(dict.fromkeys(fact["test"] for fact in facts if fact["outcome"] == outcome))
        for outcome in ("failed", "started", "finished")
    }
    unfinished = tuple(test for test in by["started"] if test not in by["finished"])
    return Outcome(status, by["failed"], unfinished, seconds, output)


def whole_lines(path: Path) -> Iterator[Any]:
    """What the lines of a file say in JSON. A line that a killed process has begun is left out."""
    for line in path.read_text().splitlines():
        with suppress(json.JSONDecodeError):
            yield json.loads(line)


def _link(path: Path, target: Path) -> None:
    target.symlink_to(path.resolve())


def left_out(tree: Path) -> Any:
    """For `shutil.copytree`: what a copy of a tree does not need."""

    def names(folder: str, inside: list[str]) -> set[str]:
        top = Path(folder) == tree
        return {name for name in inside if name == "__pycache__" or (top and name in OUTSIDE)}

    return names
