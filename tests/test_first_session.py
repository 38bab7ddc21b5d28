"""The README's first session, as a newcomer would have it: train the default model, sample from it."""

import builtins
import json
import keyword
import os
import re
import shlex
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
SLEEPING = {"OMP_WAIT_POLICY": "passive"}
WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
Cli = Callable[..., subprocess.CompletedProcess[str]]


def quoted(command: str) -> tuple[list[str], str]:
    """The README's block that shows `command`: its whole command line, and what it printed."""
    readme = (ROOT / "README.md").read_text()
    block = re.search(rf"^    \$ ({re.escape(command)}.*)\n((?:    .*\n|\n(?=    ))*)", readme, re.MULTILINE)
    assert block, f"README shows no '{command}'"
    printed = "".join(line.removeprefix("    ") for line in block[2].splitlines(keepends=True))
    return shlex.split(block[1]), printed


def newcomers() -> dict[str, str]:
    """The environment of somebody who has set nothing; threads that wait sleep, as other tests need the cores."""
    return {**{name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}, **SLEEPING}


def machine() -> dict[str, object]:
    """What decides the last bit of a training run."""
    asked = [sys.executable, "-c", "import torch; print(torch.get_num_threads())"]
    return {
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": int(subprocess.run(asked, env=newcomers(), check=True, capture_output=True, text=True).stdout),
    }


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which the default model was trained: minutes, once."""
    folder = tmp_path_factory.mktemp("session")
    command, _ = quoted("mplug train")
    process = [sys.executable, "-m", *command]
    subprocess.run(process, cwd=folder, env=newcomers(), check=True, capture_output=True, timeout=1800)
    return folder


def metrics(session: Path) -> list[dict]:
    return [json.loads(line) for line in next(session.glob("runs/*/metrics.jsonl")).read_text().splitlines()]


def test_the_default_run_reaches_one_and_a_half_nats_a_byte(session: Path) -> None:
    assert metrics(session)[-1]["val_loss"] <= 1.5


def test_most_words_of_the_sample_are_words_of_python_or_of_its_library(session: Path, cli: Cli) -> None:
    command, _ = quoted("mplug generate")
    sample = cli(*command[1:], cwd=session)
    words = WORD.findall(sample.stdout)
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    text = " ".join(path.read_text(errors="replace") for path in stdlib.glob("*.py"))
    known = {*keyword.kwlist, *dir(builtins), *WORD.findall(text)}
    assert len(words) >= 20
    assert sum(word in known for word in words) >= 0.6 * len(words)


def test_the_readme_quotes_the_sample_of_its_seed(session: Path, cli: Cli) -> None:
    command, printed = quoted("mplug generate")
    sample = cli(*command[1:], cwd=session)
    assert sample.returncode == 0
    assert cli(*command[1:], cwd=session).stdout == sample.stdout, "a seed gives one text"
    assert cli(*command[1:], "--seed", "1", cwd=session).stdout != sample.stdout
    recorded = json.loads((ROOT / "tests" / "first_session.json").read_text())
    if machine() != recorded["machine"]:
        pytest.skip(
            f"the README's sample was drawn on {recorded['machine']}, where training rounds otherwise than here"
        )
    lines, shown = ([line.rstrip() for line in text.rstrip().splitlines()] for text in (sample.stdout, printed))
    assert lines == shown
