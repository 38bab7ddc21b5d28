"""The command line as a fixture: `mplug` in a process of its own, or in this one."""

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from warm import run_module

from mplug.cli import main

Cli = Callable[..., subprocess.CompletedProcess[str]]
"""Runs `mplug` with words of the command line (`cli`, `cli_here`)."""


def surroundings(path: Path | None) -> dict[str, str]:
    """The environment of a command; `path` goes in front of PYTHONPATH."""
    found_first = [str(path)] if path is not None else []
    searched = os.pathsep.join([*found_first, *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200", "PYTHONPATH": searched}


def assert_refused(result: subprocess.CompletedProcess[str], words: list[str]) -> None:
    """The user's input is wrong: exit status 2 and a message with these words, without a traceback.

    A word after an exclamation mark must be absent.
    """
    assert result.returncode == 2, result.stdout + result.stderr
    assert "Traceback" not in result.stderr
    assert result.stderr.startswith("mplug:")
    assert [word for word in words if (word.lstrip("!") in result.stderr) == word.startswith("!")] == [], result.stderr


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    """Run `mplug` as a user would, in a folder of its own, in a process that has imported torch already."""

    def run(*arguments: str, path: Path | None = None, cwd: Path = tmp_path, timeout: float = 600):
        return run_module("mplug", *arguments, cwd=cwd, environment=surroundings(path), timeout=timeout)

    return run


@pytest.fixture
def cli_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Cli:
    """Run `mplug` as `cli` does, in this process: for commands that change nothing in it, such as `mplug config`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            main(list(arguments), prog_name="mplug")
        return subprocess.CompletedProcess(["mplug", *arguments], int(ended.value.code or 0), *capfd.readouterr())

    return run
