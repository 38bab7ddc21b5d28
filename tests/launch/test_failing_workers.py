"""Runs whose workers die, fail or run out of time, and those that start again."""

import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from distributions import installed
from launched import (
    MPLUG,
    TORCHRUN,
    Command,
    Same,
    Whole,
    assert_same_bits,
    begin,
    free_port,
    metrics,
    poll,
    steps_saved,
    train,
    wait_for_steps,
)

from mplug.errors import UsageError
from mplug_launch.launch import launch
from mplug_launch.pipes import TERMINATED, Handler, Pipes, PortInUse

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are looked for in /proc")


# What ends a run.


def endless(folder: Path, options: list[str], name: str, layout: str = "tp2") -> Command:
    endless = ("--set", "trainer.steps=100000", "--set", "checkpoint.every=0")
    command = train(folder, name, "--parallel", layout, *options, *endless)
    wait_for_steps(command, folder / "runs" / name, 2)
    return command


@pytest.mark.parametrize("layout", ["tp2", pytest.param("dp2", marks=pytest.mark.wide("kills"))])
def test_a_worker_that_is_killed_ends_the_run_in_a_sentence_that_names_its_rank(
    layout: str, folder: Path, options: list[str]
) -> None:
    command = endless(folder, options, f"killed-{layout}", layout)
    os.kill(command.worker(1), signal.SIGKILL)
    command.refused(1, "rank 1", socket.gethostname(), "in step", "SIGKILL")


HOW_WORKERS_FAIL = [
    ("tp2", 1, signal.SIGKILL),
    pytest.param("dp2", 1, signal.SIGSTOP, marks=pytest.mark.wide("kills")),
    pytest.param("dp2tp2", 2, signal.SIGKILL, marks=pytest.mark.wide("kills")),
    pytest.param("tp2pp2", 0, signal.SIGSTOP, marks=pytest.mark.wide("kills")),
]


@pytest.mark.parametrize(("layout", "rank", "number"), HOW_WORKERS_FAIL)
@pytest.mark.wide("kills")
def test_with_a_restart_a_run_of_which_a_worker_is_killed_or_stopped_ends_as_if_nothing_had_happened(
    folder: Path, options: list[str], whole: Whole, assert_bitwise: Same, layout: str, rank: int, number: signal.Signals
) -> None:
    words = ("--restarts", "1", "--set", "extensions.watchdog.timeout=6")
    run = folder / "runs" / f"restarted-{layout}"
    command = train(folder, run.name, "--parallel", layout, *words, *options)
    wait_for_steps(command, run, 7)
    poll(lambda: any((run / "checkpoints").glob("step_*")), f"{run.name} has saved a checkpoint")
    os.kill(command.worker(rank), number)
    result = command.succeeded()
    assert len(result.stderr.splitlines()) == 1, result.stderr
    assert f"rank {rank}" in result.stderr
    assert ("stopped sending heartbeats" in result.stderr) == (number == signal.SIGSTOP)
    assert "continuing from step" in result.stderr
    assert "restart 1 of 1" in result.stderr
    assert_same_bits(run, whole(layout), assert_bitwise)


@pytest.mark.wide("kills")
def test_torchrun_restarts_a_run_by_its_own_option(
    folder: Path, options: list[str], whole: Whole, assert_bitwise: Same
) -> None:
    torchrun = ("--max-restarts=1", "--monitor-interval=0.1", "--master-port", free_port())
    words = ("train", "--name", "torchrun-restarted", "--parallel", "tp2", *options)
    command, run = begin(folder, *TORCHRUN, *torchrun, *MPLUG, *words), folder / "runs" / "torchrun-restarted"
    wait_for_steps(command, run, 7)
    os.kill(command.worker(1), signal.SIGKILL)
    command.succeeded()
    assert_same_bits(run, whole("tp2"), assert_bitwise)


def test_workers_do_not_outlive_the_command_that_is_killed(folder: Path, options: list[str]) -> None:
    command = endless(folder, options, "orphans")
    assert command.worker(0) != command.worker(1)
    command.process.kill()
    command.ended()


MISCHIEF = """
import time
from pydantic import BaseModel, ConfigDict, Field
from mplug import RunError, UsageError, WeightExchange, hookimpl

ERRORS = {"ValueError": ValueError, "RunError": RunError, "UsageError": UsageError}

class Mischief:
    class Config(BaseModel):
        model_config = ConfigDict(extra="forbid", frozen=True)
        error: str = Field("", description="what rank 1 raises in the second step")
        hurries: bool = Field(False, description="puts the clock forward by an hour in the third step")

    def __init__(self, config):
        self.config = config

    @hookimpl
    def wrap_model(self, run, model):
        def fall():
            if run.rank == 1 and run.step == 2 and self.config.error:
                raise ERRORS[self.config.error]("over the second step")

        model.exchanges.append(WeightExchange(begin=fall, wait=None))

    @hookimpl
    def step_started(self, run):
        if run.step == 3 and self.config.hurries:
            now = time.time
            time.time = lambda: now() + 3600
"""


@pytest.fixture(scope="module")
def mischief(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder for PYTHONPATH in which an extension is installed that fails or hurries."""
    site = tmp_path_factory.mktemp("mischief")
    return str(installed(site, "acme-mischief", "[mplug.extensions]\nmischief = acme_mischief:Mischief\n", MISCHIEF))


@pytest.mark.wide("kills")
def test_time_ends_a_run_before_it_is_over_and_what_was_done_is_saved(
    folder: Path, options: list[str], mischief: str
) -> None:
    """The limit is reached in the third step or the one after it."""
    words = ("--parallel", "tp2", "--max-minutes", "30", "--set", "extensions.mischief.hurries=true")
    result = train(folder, "timed", *options, *words, PYTHONPATH=mischief).succeeded()
    run = folder / "runs" / "timed"
    (step,) = steps_saved(run)
    assert 3 <= step <= 4
    assert f"out of time after step {step}, which is saved" in result.stdout
    assert metrics(run)[-1]["step"] == step


@pytest.mark.parametrize(
    ("error", "status"),
    [("ValueError", 1), ("UsageError", 2), pytest.param("RunError", 1, marks=pytest.mark.wide("kills"))],
)
@pytest.mark.wide("kills", quick=["ValueError-1"])
def test_an_error_of_one_worker_ends_the_run_in_one_sentence(
    error: str, status: int, folder: Path, options: list[str], mischief: str
) -> None:
    name = f"falls-{error}"
    words = ("--parallel", "tp2", "--set", f"extensions.mischief.error={error}")
    named = ("rank 1",) if error == "ValueError" else ()
    train(folder, name, *options, *words, PYTHONPATH=mischief).refused(status, "over the second step", *named)
    assert metrics(folder / "runs" / name)[-1]["step"] <= 2
    if error == "ValueError":
        log = (folder / "runs" / name / "logs" / "rank1.log").read_text()
        assert all(words in log for words in ("Traceback", "acme_mischief.py", "ValueError: over the second step"))


def beside_another_program(folder: str, taken: int, send: Any) -> int:
    """Find the port taken for the first `taken` times; the number of starts."""
    if os.environ["RANK"] == "1":
        time.sleep(1)
        return 0
    starts = len(list(Path(folder).iterdir())) + 1
    Path(folder, str(starts)).touch()
    if starts <= taken:
        raise PortInUse("the port is in use")
    return starts


@pytest.mark.wide("kills")
def test_processes_whose_port_was_taken_meanwhile_start_again_with_another_one(tmp_path: Path) -> None:
    assert launch(2, beside_another_program, str(tmp_path), 1) == 2
    with pytest.raises(UsageError, match="in use"):
        launch(1, beside_another_program, str(tmp_path), 9)


def test_a_signal_reaches_the_processes_that_live_though_others_have_died() -> None:
    lines = Pipes(3)
    lines.child_ends[1].close()
    with Handler(lines) as handler:
        handler._handle(signal.SIGTERM, None)
        handler._handle(signal.SIGINT, None)  # at once: of the same stop
    assert handler.signal == signal.SIGTERM
    assert [lines.child_ends[rank].recv() for rank in (0, 2)] == [signal.SIGTERM] * 2
    handler.when -= 60
    handler._handle(signal.SIGINT, None)  # later: everybody ends
    assert lines.own_ends == {}
    lines.listen(0.0)


def test_what_failed_before_a_signal_is_told_and_not_the_signal() -> None:
    lines = Pipes(2)
    lines.child_ends[1].send(("RunError", "no space left on the device"))
    lines.listen(0.1)
    assert lines.failed_before(time.monotonic() - 60)
    assert str(lines.first_failure({})) == "no space left on the device"
    lines.close()


def test_a_process_that_elastic_ends_has_not_failed() -> None:
    lines = Pipes(2)
    lines.child_ends[0].send(("ValueError", "over the second step"))
    lines.child_ends[1].send(TERMINATED)
    lines.child_ends[1].close()  # heard at once, as a death would be that had caused the other's error
    for _ in range(3):
        lines.listen(0.05)
    assert str(lines.first_failure({})).endswith("failed with ValueError: over the second step")
    assert lines.failing_for() > 0
    lines.close()


@pytest.mark.wide("kills")
def test_a_run_that_fails_again_and_again_ends_with_its_restarts(
    folder: Path, options: list[str], mischief: str
) -> None:
    words = ("--parallel", "tp2", "--set", "extensions.mischief.error=ValueError", "--restarts", "1")
    result = train(folder, "falls-again", *options, *words, PYTHONPATH=mischief).ended()
    assert result.returncode == 1
    first, second = result.stderr.splitlines()
    assert "from scratch (restart 1 of 1)" in first
    assert "over the second step" in second


@pytest.mark.wide("kills")
def test_a_loss_that_is_not_finite_is_not_tried_again(folder: Path, options: list[str]) -> None:
    command = train(folder, "diverged", *options, "--restarts", "3", "--set", "optimizer.lr=1e30")
    command.refused(1, "has a loss of", "trainer.nonfinite=skip")
