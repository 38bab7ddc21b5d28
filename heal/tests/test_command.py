"""`mplug runs relayout`: a run of two processes changes its layout, refuses one, and ends."""

import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

import mplug_heal.relayouts
from mplug import hookimpl
from mplug.cli import main
from mplug.run.metrics_file import METRICS
from mplug.run.prepare import prepare
from mplug.run.run import Run
from mplug.training.loop import train
from mplug.training.metrics_writer import MetricsFile
from mplug_heal.requests import REQUEST, is_asked, take
from mplug_saving import lock
from mplug_testing import run_workers
from mplug_testing.harness import as_rank, tiny_config

SETTINGS = {"trainer.steps": 6, "trainer.eval_every": 0, "checkpoint.every": 0}


class Pace:
    """On rank 0, ends each step from the second on when a request has been made, or the command has its answers."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @hookimpl
    def step_finished(self, run: Run, record: dict[str, Any]) -> None:
        while run.rank == 0 and not (is_asked(self.folder) or (self.folder / "go").exists()):
            time.sleep(0.01)


def trained(folder: str) -> str:
    """Be one rank of a run of two; its last layout."""
    config = tiny_config({**SETTINGS, "parallel.layout": "dp2"})
    run = as_rank(prepare(config, {"host/pace": Pace(Path(folder)), "host/metrics": MetricsFile()}, Path(folder)))
    mplug_heal.relayouts.INTERVAL = 0.0
    train(run)
    return run.config.parallel.layout


def relayout(layout: str) -> Result:
    return CliRunner().invoke(main, ["runs", "relayout", "one", "--parallel", layout])


def test_the_command_changes_the_layout_of_a_run_and_reports_a_refusal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs" / "one"
    claim = lock.take(folder, print)
    with ThreadPoolExecutor(1) as threads:
        ranks = threads.submit(run_workers, 2, trained, str(folder))
        try:
            while not (folder / METRICS).exists():
                assert not ranks.done(), ranks.result()
                time.sleep(0.01)
            changed, refused = relayout("tp2"), relayout("tp4")
        finally:
            (folder / "go").touch()
        layouts = ranks.result()
    claim.release()
    assert changed.exit_code == 0, changed.output
    assert changed.output.startswith("layout 'dp2' -> 'tp2' after step ")
    assert layouts == ["tp2", "tp2"]
    assert refused.exit_code == 2
    assert "the run 'one' goes on under its layout: layout 'tp4' is for 4 ranks, and the run has 2" in refused.output
    assert yaml.safe_load((folder / "config.yaml").read_text())["parallel"]["layout"] == "tp2"
    assert json.loads((folder / "record.json").read_text())["layout"] == "tp2"
    ended = relayout("dp2")
    assert ended.exit_code == 2
    assert "does not train now" in ended.output
    assert "mplug train --resume --name one --parallel dp2" in ended.output
    assert not (folder / REQUEST).exists()


def test_the_request_of_a_command_that_has_been_killed_is_withdrawn(tmp_path: Path) -> None:
    code = "import pathlib, sys; from mplug_heal.requests import ask; ask(pathlib.Path(sys.argv[1]), 'tp2')"
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)
    assert is_asked(tmp_path)
    assert take(tmp_path) is None
    assert not is_asked(tmp_path)
