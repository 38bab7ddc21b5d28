"""Runs of several processes that a signal or a full disk ends, and runs that go on from their checkpoints."""

import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from launched import (
    MPLUG,
    TEXT,
    Command,
    Same,
    Whole,
    assert_same_bits,
    assert_same_losses,
    begin,
    metrics,
    saved_at,
    steps_saved,
    train,
    wait_for_steps,
)
from torch import Tensor

from mplug.training.interrupt import STOPPING

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are looked for in /proc")
Logical = Callable[[Path], dict[str, Tensor]]
STOPS: dict[str, tuple[Callable[[Command], None], signal.Signals]] = {
    "sigterm": (lambda command: command.process.terminate(), signal.SIGTERM),
    "ctrl-c": (lambda command: os.killpg(command.process.pid, signal.SIGINT), signal.SIGINT),
    "sigterm-to-rank-1": (lambda command: os.kill(command.worker(1), signal.SIGTERM), signal.SIGTERM),
}


@pytest.mark.parametrize(
    "how", [*(pytest.param(how, marks=pytest.mark.wide("kills")) for how in ("sigterm", "ctrl-c")), "sigterm-to-rank-1"]
)
@pytest.mark.wide("kills")
def test_a_signal_ends_the_run_after_a_step_that_all_ranks_save_and_resuming_is_bitwise_the_uninterrupted_run(
    how: str, folder: Path, options: list[str], whole: Whole, assert_bitwise: Same
) -> None:
    (stop, number), run = STOPS[how], folder / "runs" / how
    command = train(folder, how, "--parallel", "tp2", *options)
    wait_for_steps(command, run, 3)
    stop(command)
    result = command.ended()
    assert result.returncode == 128 + number, result.stdout + result.stderr
    assert result.stderr == (STOPPING.decode() if number == signal.SIGINT else "")
    last = metrics(run)[-1]["step"]
    assert 3 <= last < 20
    assert steps_saved(run)[-1] == last
    assert f"stopped after step {last}" in result.stdout
    train(folder, how, "--resume").succeeded()
    assert_same_bits(run, whole("tp2"), assert_bitwise)


# Checkpoints under other layouts.


@pytest.mark.parametrize("layout", ["tp2", "tp2pp2"])
@pytest.mark.wide("layouts", quick=["tp2"])
def test_a_checkpoint_holds_the_logical_tensors_of_one_process(layout: str, whole: Whole, logical: Logical) -> None:
    for step in (15, 20):
        found, wanted = (logical(saved_at(whole(one), step)) for one in (layout, ""))
        assert found.keys() == wanted.keys()
        off = {name: float((found[name] - wanted[name]).norm() / wanted[name].norm()) for name in wanted}
        assert {name: error for name, error in off.items() if not error <= 1e-9} == {}


def test_a_run_of_tp2_goes_on_in_one_process(folder: Path, whole: Whole) -> None:
    moved = folder / "runs" / "alone"
    shutil.copytree(whole("tp2"), moved, ignore=lambda _, names: {"step_00000020"} & set(names))
    train(folder, "alone", "--resume", "--parallel", "", "--set", "trainer.steps=20").succeeded()
    assert_same_losses(moved, whole(""))


@pytest.mark.wide("kills")
def test_a_disk_that_is_full_ends_all_ranks_and_leaves_the_earlier_checkpoint(
    options: list[str], small_disk: Path
) -> None:
    (small_disk / "text.txt").write_text(TEXT)
    words = ("--set", "checkpoint.every=1", "--set", "checkpoint.keep=9", "--parallel", "tp2")
    small = ("--set", "trainer.precision=fp32")  # the first checkpoint must fit
    result = train(small_disk, "full", *options, *words, *small).ended()
    saved = steps_saved(small_disk / "runs" / "full")
    assert result.returncode == 1
    (line,) = result.stderr.splitlines()
    for words in (f"step_{saved[-1] + 1:08d}", "no space left", f"step_{saved[-1]:08d}", "intact"):
        assert words in line


# What is seen before a run.


@pytest.mark.wide("layouts")
def test_a_layout_of_64_ranks_for_175b_is_explained_without_processes(folder: Path) -> None:
    result = begin(folder, *MPLUG, "explain", "--preset", "175b", "--parallel", "tp8pp8").succeeded()
    words = ("64 ranks", "blocks.12 to 23", "parallel/tp", "Linear.gather", "blocks.*.attn.qkv.weight", "weights")
    assert [word for word in words if word not in result.stdout] == []
