"""The README's first session, as a newcomer would have it: train the default model, sample from it.

The quick tests train the default model for 12 shorter steps. `pytest --wide session` runs the command of the README.
"""

import builtins
import json
import keyword
import math
import os
import re
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch
import yaml
from command_line import Cli

ROOT = Path(__file__).parent.parent
SLEEPING = {"OMP_WAIT_POLICY": "passive"}
WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


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


SHORTER = {"steps": 12, "seq_length": 128, "eval_every": 6, "eval_samples": 8}


def train(folder: Path, *changes: str) -> str:
    command, _ = quoted("mplug train")
    process = [sys.executable, "-u", "-m", *command, *changes]  # no fork, which would have the threads of the tests
    environment = {**newcomers(), "COLUMNS": "200"}
    finished = subprocess.run(
        process, cwd=folder, env=environment, check=True, capture_output=True, text=True, timeout=1800
    )
    return finished.stdout


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder in which the default model was trained for a few seconds, and what the command printed."""
    folder = tmp_path_factory.mktemp("short")
    shorter = [f"trainer.{name}={value}" for name, value in SHORTER.items()]
    words = [word for field in (*shorter, "schedule.warmup_steps=3") for word in ("--set", field)]
    return folder, train(folder, *words)


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which the default model was trained: minutes, once."""
    folder = tmp_path_factory.mktemp("session")
    train(folder)
    return folder


def metrics(session: Path) -> list[dict]:
    return [json.loads(line) for line in next(session.glob("runs/*/metrics.jsonl")).read_text().splitlines()]


def shapes(text: str) -> set[str]:
    """The lines of a text with `#` for every number, and one space between words."""
    return {re.sub(r"\d[\d.,:]*(e[+-]\d+)?", "#", " ".join(line.split())) for line in text.splitlines()}


def test_the_default_model_learns_within_seconds(short: tuple[Path, str]) -> None:
    steps = metrics(short[0])
    assert len(steps) == 12
    assert steps[0]["loss"] == pytest.approx(math.log(256), abs=0.2)
    assert steps[-1]["val_loss"] < 3.5
    assert "validation loss" in next(short[0].glob("runs/*/loss.svg")).read_text()


def test_the_readme_quotes_the_lines_of_a_run(short: tuple[Path, str]) -> None:
    _, printed = quoted("mplug train")
    steps = yaml.safe_load((ROOT / "mplug" / "config" / "default.yaml").read_text())["trainer"]["steps"]
    assert f"{steps} steps, from scratch" in printed
    assert len(printed.splitlines()) > 5
    assert shapes(printed) - shapes(short[1]) == set()


def test_a_seed_gives_one_sample_and_another_seed_another(short: tuple[Path, str], cli: Cli) -> None:
    command, _ = quoted("mplug generate")
    short_command = [*command[1:], "--tokens", "60"]
    sample = cli(*short_command, cwd=short[0])
    assert sample.returncode == 0, sample.stderr
    assert sample.stdout.startswith(command[command.index("--prompt") + 1])
    assert cli(*short_command, cwd=short[0]).stdout == sample.stdout
    assert cli(*short_command, "--seed", "1", cwd=short[0]).stdout != sample.stdout


# The whole session.


@pytest.mark.wide("session")
def test_the_default_run_reaches_one_and_a_half_nats_a_byte_and_its_sample_has_words_of_python(
    session: Path, cli: Cli
) -> None:
    assert metrics(session)[-1]["val_loss"] <= 1.5
    command, _ = quoted("mplug generate")
    words = WORD.findall(cli(*command[1:], cwd=session).stdout)
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    text = " ".join(path.read_text(errors="replace") for path in stdlib.glob("*.py"))
    known = {*keyword.kwlist, *dir(builtins), *WORD.findall(text)}
    assert len(words) >= 20
    assert sum(word in known for word in words) >= 0.6 * len(words)


@pytest.mark.wide("session")
def test_the_readme_quotes_the_sample_of_its_seed(session: Path, cli: Cli) -> None:
    command, printed = quoted("mplug generate")
    sample = cli(*command[1:], cwd=session)
    assert sample.returncode == 0, sample.stderr
    recorded = json.loads((ROOT / "tests" / "first_session.json").read_text())
    if machine() != recorded["machine"]:
        pytest.skip(
            f"the README's sample was drawn on {recorded['machine']}, where training rounds otherwise than here"
        )
    lines, shown = ([line.rstrip() for line in text.rstrip().splitlines()] for text in (sample.stdout, printed))
    assert lines == shown
