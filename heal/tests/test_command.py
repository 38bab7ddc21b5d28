"""`mplug runs relayout`: real processes change their layout, refuse one, and end."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner, Result
from warm import Forked

from mplug.cli import main
from mplug.run.metrics_file import METRICS, read_lines
from mplug_heal.requests import REQUEST, is_asked, take

SETTINGS = {
    "model.num_layers": 2,
    "model.hidden_size": 32,
    "model.num_attention_heads": 2,
    "trainer.seq_length": 16,
    "trainer.steps": 1_000_000,
    "trainer.eval_every": 0,
    "trainer.device": "cpu",
    "checkpoint.every": 0,
    "data.name": "mock",
}


@pytest.fixture
def training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Forked]:
    """A run 'one' of two processes that has done two steps, in the current folder."""
    monkeypatch.chdir(tmp_path)
    words = ["train", "--name", "one", "--parallel", "dp2"]
    words += [word for name, value in SETTINGS.items() for word in ("--set", f"{name}={value}")]
    process = Forked("mplug", *words, cwd=tmp_path, environment=os.environ)
    try:
        wait_for_steps(process, 2)
        yield process
    finally:
        process.kill()
        process.communicate()


def last_step() -> int:
    lines = list(read_lines(Path("runs/one") / METRICS))
    return lines[-1][0] if lines else 0


def wait_for_steps(process: Forked, count: int) -> None:
    first = last_step()
    while last_step() < first + count:
        assert process.poll() is None
        time.sleep(0.05)


def relayout(layout: str, *options: str) -> Result:
    return CliRunner().invoke(main, ["runs", "relayout", "one", "--parallel", layout, *options])


def test_the_command_changes_the_layout_of_a_run_and_reports_a_refusal(training: Forked) -> None:
    changed = relayout("tp2")
    assert changed.exit_code == 0, changed.output
    assert changed.output.startswith("layout 'dp2' -> 'tp2' after step ")
    refused = relayout("tp4")
    assert refused.exit_code == 2
    assert "the run 'one' goes on under its layout: layout 'tp4' is for 4 ranks, and the run has 2" in refused.output
    wait_for_steps(training, 2)
    folder = Path("runs/one")
    assert yaml.safe_load((folder / "config.yaml").read_text())["parallel"]["layout"] == "tp2"
    assert json.loads((folder / "record.json").read_text())["layout"] == "tp2"
    training.send_signal(signal.SIGTERM)
    training.communicate(60)
    assert training.returncode == 128 + signal.SIGTERM
    ended = relayout("dp2")
    assert ended.exit_code == 2
    assert "does not train now (it is stopped)" in ended.output
    assert "mplug train --resume --name one --parallel dp2" in ended.output
    assert not (folder / REQUEST).exists()


def test_the_request_of_a_command_that_has_been_killed_is_withdrawn(tmp_path: Path) -> None:
    code = "import pathlib, sys; from mplug_heal.requests import ask; ask(pathlib.Path(sys.argv[1]), 'tp2')"
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)
    assert is_asked(tmp_path)
    assert take(tmp_path) is None
    assert not is_asked(tmp_path)
