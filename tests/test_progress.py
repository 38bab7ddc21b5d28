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

from mplug.cli import main
from mplug.training.interrupt import Interrupt
from mplug.training.observers import ProgressLine

RECORD: dict[str, Any] = {"step": 12_345, "loss": 2.34567, "grad_norm": 0.5, "lr": 3e-4, "tokens_per_s": 1_234_567.8}
RECORD |= {"tflops": 412.3, "mfu": 0.417, "memory_gib": 71.25, "skipped": False}


def shown(width: int) -> str:
    """What a terminal of so many columns gets at one step of a long run."""
    console = Console(file=StringIO(), force_terminal=True, width=width)
    line = ProgressLine(console, total_steps=100_000, log_every=1000)
    line.run_started(SimpleNamespace(step=12_344, depends_on_layout=()))  # type: ignore[arg-type]
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
