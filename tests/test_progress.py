"""What a run tells while it goes on: the bar of a terminal, and that a stop was heard."""

import re
import signal
from io import StringIO
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner
from mplug_explain import command
from rich.console import Console

from mplug import Run, hookimpl
from mplug.cli import main
from mplug.run.durations import TRIAL
from mplug.run.prepare import prepare
from mplug.training.assembly import build
from mplug.training.interrupt import Interrupt
from mplug.training.loop import launch_step
from mplug_estimates.course import loss_warning
from mplug_progress import progress_line
from mplug_progress.progress_line import ProgressLine, TimeRemaining, step_line
from mplug_testing.harness import tiny_config, tiny_run

RECORD: dict[str, Any] = {"step": 12_345, "loss": 2.34567, "grad_norm": 0.5, "lr": 3e-4, "tokens_per_s": 1_234_567.8}
RECORD |= {"targets_per_s": 1_234_567.8}
RECORD |= {"tflops": 412.3, "mfu": 0.417, "memory_gib": 71.25, "skipped": False}


def shown(width: int) -> str:
    """What a terminal of so many columns gets at one step of a long run."""
    console = Console(file=StringIO(), force_terminal=True, width=width)
    line = ProgressLine(console, total_steps=100_000, log_every=1000)
    line.run_started(SimpleNamespace(step=12_343, depends_on_layout=()))  # type: ignore[arg-type]
    line.step_finished({**RECORD, "step": 12_344})  # type: ignore[arg-type]
    line.step_finished(RECORD)  # type: ignore[arg-type]
    line.bar.refresh()
    line.run_finished()
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return text


@pytest.mark.parametrize("width", [80, 160])
def test_the_bar_and_the_time_that_is_left_fit_on_a_terminal(width: int) -> None:
    text = shown(width)
    assert re.search(r" 12345/100000  loss 2\.3457  1,234,568 tokens/s  [\d:]+ left\n", text)
    assert "━" * 8 in text
    assert "…" not in text


def slow(run: Any, now: list[float], took: float, monkeypatch: pytest.MonkeyPatch, terminal: bool = True) -> str:
    """What a console gets in the first step of a run, in which two micro batches of 64 take so many seconds each."""
    monkeypatch.setattr(progress_line.time, "monotonic", lambda: now[0])
    console = Console(file=StringIO(), force_terminal=terminal, width=160)
    line = ProgressLine(console, total_steps=200, log_every=10)
    run.step = 0
    line.run_started(run)
    run.step = 1
    for number in range(3):
        line.micro_batch_began(run, number, 64)
        line.bar.refresh()
        now[0] += took
    line.run_finished()
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return text


def test_a_slow_step_shows_its_micro_batches_and_its_first_one_says_how_long_steps_take(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run, now = tiny_run({}), [100.0]
    run.depends_on_layout = []
    text = slow(run, now, 11, monkeypatch)
    assert "the first of 64 micro batches took 0:11: about 11:44 per step, 39:06:40 for 200 steps; fewer tokens" in text
    assert "1/200  micro batch 2 of 64  0:11" in text
    assert "1/200  micro batch 3 of 64  0:22" in text
    assert "micro batch" not in slow(run, now, 0.01, monkeypatch)
    piped = slow(run, now, 1, monkeypatch, terminal=False)
    assert (
        piped.strip() == "the first of 64 micro batches took 0:01: about 1:04 per step, 3:33:20 for 200 steps; " + TRIAL
    )
    for changes in ({"parallel.layout": "pp2"}, {}):  # the order of a pipeline, and a device that computes later
        other = tiny_run(changes)
        other.depends_on_layout, other.device = [], "cpu" if changes else "cuda"
        assert slow(other, now, 11, monkeypatch, terminal=False) == ""


def test_observers_hear_of_each_micro_batch_of_a_step() -> None:
    heard = []

    class Listener:
        @hookimpl
        def micro_batch_began(self, run: Run, number: int, count: int) -> None:
            heard.append((run.step, number, count))

    config = tiny_config({"trainer.micro_batch_size": 1, "trainer.global_batch_size": 3})
    run = prepare(config, {"commands/listener": Listener()})
    parts = build(run)
    for run.step in (1, 2):
        launch_step(run, parts, 3, 1e-3, 0.0)
    assert heard == [(step, number, 3) for step in (1, 2) for number in range(3)]


def test_a_minute_without_a_line_ends_with_one(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(progress_line.time, "monotonic", lambda: now[0])
    console = Console(file=StringIO(), width=160)
    line = ProgressLine(console, total_steps=200, log_every=100)
    line.run_started(SimpleNamespace(step=0, depends_on_layout=()))  # type: ignore[arg-type]
    for step in range(1, 8):
        now[0] += 25
        line.step_finished({**RECORD, "step": step})  # type: ignore[arg-type]
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    assert re.findall(r"step +(\d+)/200", text) == ["1", "4", "7"]


def test_the_remaining_time_follows_recent_steps_and_counts_evaluations() -> None:
    remaining = TimeRemaining()
    remaining.begin(100.0)
    now = 220.0  # the first step compiles
    assert remaining.step(now, 1000) is None
    for step in range(2, 102):
        evaluates = step % 50 == 0
        now += 35 if evaluates else 10
        left = remaining.step(now, 1001 - step, evaluates)
    assert left == pytest.approx(900 * (10 + 2 * 25 / 100), rel=1e-9)
    for step in range(102, 202):  # other processes take their part of the machine
        now += 40
        left = remaining.step(now, 1001 - step)
    assert left == pytest.approx(800 * (40 + 2 * 25 / 200), rel=1e-9)
    assert TimeRemaining().step(5.0, 0) == 0.0


def test_the_line_of_a_step_has_its_targets_if_not_every_token_is_one() -> None:
    assert "1,234,568 tokens/s  412" in step_line(RECORD, 100_000, None)
    assert "1,234,568 tokens/s (300,000 targets/s)  412" in step_line(RECORD | {"targets_per_s": 3e5}, 100_000, None)
    assert " left" not in step_line(RECORD, 100_000, None)


def test_ctrl_c_is_acknowledged_at_once_and_by_one_process(capfd: pytest.CaptureFixture[str]) -> None:
    for rank, number in ((0, signal.SIGINT), (1, signal.SIGINT), (0, signal.SIGTERM)):
        run: Any = SimpleNamespace(rank=rank, stop_requested=False)
        Interrupt(run).first(number)
        assert run.stop_requested
    told = capfd.readouterr().err
    assert told.startswith("stopping: the run finishes and saves the current step, and cancels an evaluation;")
    assert told.count("\n") == 1


def test_ctrl_c_ends_a_command_with_the_status_of_the_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(**_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "callback", interrupted)
    assert CliRunner().invoke(main, ["explain"]).exit_code == 128 + signal.SIGINT


def test_a_loss_far_above_that_of_a_uniform_guess_is_a_warning() -> None:
    assert loss_warning(5.9, 256) == loss_warning(None, 256) == loss_warning(8.3, 256) == []
    (warning,) = loss_warning(333_451.2, 256)
    assert warning.startswith(
        "the last loss, 3.335e+05, is far above 5.545, the loss of a uniform guess among 256 tokens:"
    )
