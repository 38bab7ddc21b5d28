"""`mplug runs list`: the state of real runs, and what the table says of them."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mplug import hookimpl
from mplug.registry.hooks import HOST
from mplug.run.prepare import prepare
from mplug.run.run import Run
from mplug.training.loop import train
from mplug.training.metrics_writer import MetricsFile
from mplug_saving import RunSummary, summary_of
from mplug_saving.lock import FOLDER, Baton, take
from mplug_saving.process import Process
from mplug_saving.summary import LOG_BLOCK
from mplug_testing.harness import tiny_config


class AtStep2:
    """An observer that acts at the end of step 2."""

    def __init__(self, act: Callable[[Run], None]) -> None:
        self.act = act

    @hookimpl
    def step_finished(self, run: Run, record: dict[str, Any]) -> None:
        if record["step"] == 2:
            self.act(run)


def nothing(run: Run) -> None:
    """The run goes on."""


def stop(run: Run) -> None:
    run.stop_requested = True


def fail(run: Run) -> None:
    raise ZeroDivisionError


def ran(directory: Path, act: Callable[[Run], None] = nothing, steps: int = 4) -> RunSummary:
    """The summary of a run of a tiny model, in which `act` is called at step 2."""
    settings = {"trainer.steps": steps, "trainer.eval_every": 2, "checkpoint.every": 0}
    run = prepare(tiny_config(settings), {f"{HOST}metrics": MetricsFile(), f"{HOST}then": AtStep2(act)})
    run.directory = directory
    train(run)
    return summary_of(directory)


def test_a_run_is_done_stopped_or_failed_as_it_ended(tmp_path: Path) -> None:
    done, stopped = ran(tmp_path / "done"), ran(tmp_path / "stopped", stop)
    with pytest.raises(ZeroDivisionError):
        ran(tmp_path / "failed", fail)
    failed = summary_of(tmp_path / "failed")
    assert [(run.state, run.step, run.steps) for run in (done, failed)] == [("done", 4, 4), ("failed", 2, 4)]
    assert (stopped.state, stopped.steps) == ("stopped", 4)
    assert 2 <= stopped.step < 4
    lines = [json.loads(line) for line in (tmp_path / "done" / "metrics.jsonl").read_text().splitlines()]
    assert (done.loss, done.val_loss, done.tokens) == (lines[3]["loss"], lines[3]["val_loss"], lines[3]["tokens"])
    speeds = sorted(line["tokens_per_s"] for line in lines)
    assert done.tokens_per_s == pytest.approx((speeds[1] + speeds[2]) / 2)
    record = json.loads((tmp_path / "done" / "record.json").read_text())
    assert (done.started, done.parameters, done.model) == (record["started"], record["parameters"], "gpt")


def test_a_run_whose_lock_a_living_process_holds_is_running(tmp_path: Path) -> None:
    summary = ran(tmp_path)
    claim = take(tmp_path, print)
    assert summary_of(tmp_path) == replace(summary, state="running")
    dead = replace(Process.this(), start=Process.this().start - 1)
    (tmp_path / FOLDER / claim.baton.name).rename(tmp_path / FOLDER / Baton.of(dead, "ab", 0).name)
    assert summary_of(tmp_path) == summary


def test_a_run_of_another_machine_is_running_while_its_lock_is_renewed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / FOLDER).mkdir()
    (tmp_path / FOLDER / Baton.of(Process("0123456789abcdef", 12, 34), "ab", 0).name).touch()
    assert summary_of(tmp_path).state == "running"
    monkeypatch.setattr("mplug_saving.lock.LEASE", -1.0)
    assert summary_of(tmp_path).state == "failed"


def test_a_resumed_run_that_was_killed_has_failed(tmp_path: Path) -> None:
    """Its log has the end of the first process, and behind it the beginning of the second and many lines."""
    ran(tmp_path)
    log = tmp_path / "logs" / "rank0.log"
    line = "2026-01-01 00:00:00,000 INFO step 5\n"
    began = next(one for one in log.read_text().splitlines() if "began as rank 0 of 1" in one)
    log.write_text(f"{log.read_text()}{line * (LOG_BLOCK // len(line))}")
    assert summary_of(tmp_path).state == "done"
    log.write_text(f"{log.read_text()}{began}\n{line * (2 * LOG_BLOCK // len(line))}")
    assert summary_of(tmp_path).state == "failed"


def test_an_incomplete_last_line_is_left_out_and_a_damaged_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("trainer: {steps: 9}\n")
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text('{"step": 1, "loss": 2.0, "tokens_per_s": 5.0}\n{"step": 2, "lo')
    found = summary_of(tmp_path)
    assert (found.step, found.loss, found.tokens_per_s, found.problem) == (1, 2.0, 5.0, "")
    metrics.write_text('{"step": 1}\nnot JSON\n')
    assert summary_of(tmp_path).problem == f"'{metrics}' is damaged"
    (tmp_path / "config.yaml").write_text("a: [")
    assert summary_of(tmp_path).problem == f"'{tmp_path / 'config.yaml'}' is damaged; '{metrics}' is damaged"


def test_the_table_and_the_json_have_the_latest_start_last(tmp_path: Path, cli_here: Any) -> None:
    for name, hour in (("late", 12), ("early", 11)):
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        (folder / "config.yaml").write_text("model: {name: gpt}\ntrainer: {steps: 3}\nparallel: {layout: tp2}\n")
        record = {"started": f"2026-01-01T{hour}:00:00+00:00", "preset": "nano", "layout": "tp2"}
        (folder / "record.json").write_text(json.dumps(record))
    (folder / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0, "tokens_per_s": 5000.0}\n')
    listed = cli_here("runs", "list").stdout.splitlines()
    assert [line.split()[0] for line in listed] == ["RUN", "early", "late"]
    row = "early failed 1/3 2.0000 - 5,000 2026-01-01 11:00 gpt nano tp2"
    assert " ".join(listed[1].split()) == row
    found = json.loads(cli_here("runs", "list", "--json").stdout)
    assert [run["name"] for run in found] == ["early", "late"]
    assert (found[0]["state"], found[0]["tokens_per_s"], found[1]["loss"]) == ("failed", 5000.0, None)


def test_a_folder_without_runs_is_no_error(cli_here: Any) -> None:
    assert cli_here("runs", "list").stdout == "there is no run in 'runs'; start one with 'mplug train'\n"
    assert cli_here("runs", "list", "--json").stdout == "[]\n"
