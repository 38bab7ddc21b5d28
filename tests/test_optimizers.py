"""Checkpoints of the bundled optimizers, divided in another way."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Cli = Callable[..., subprocess.CompletedProcess[str]]


def losses_of(run: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


RESHARD = pytest.mark.wide("reshard")
CASES = [pytest.param("lion", "tp2", 1e-3, marks=RESHARD), ("muon", "pp2", 5e-3)]
CASES += [pytest.param("sgd", "tp2", 0.1, marks=RESHARD)]


@pytest.mark.parametrize(("optimizer", "layout", "rate"), CASES)
def test_a_run_that_goes_on_under_another_layout_ends_as_one_process_does(
    cli: Cli, tiny: list[str], text_file: Path, logical: Any, optimizer: str, layout: str, rate: float
) -> None:
    fields = (f"data.path={text_file}", f"optimizer.lr={rate}", "schedule.name=constant", "schedule.warmup_steps=0")
    fields += ("trainer.precision=fp64",)
    words = ("--optimizer", optimizer, *tiny, *(word for field in fields for word in ("--set", field)))
    commands = (
        ("--name", "whole", *words),
        ("--name", "divided", "--parallel", "dp2", *words, "--set", "trainer.steps=2"),
        ("--name", "divided", "--resume", "--parallel", layout, "--set", "trainer.steps=4"),
    )
    for command in commands:
        finished = cli("train", *command)
        assert finished.returncode == 0, finished.stderr
    runs = {name: text_file.parent / "runs" / name for name in ("whole", "divided")}
    losses = {name: losses_of(run) for name, run in runs.items()}
    assert losses["divided"] == pytest.approx(losses["whole"], rel=1e-10)
    wanted, found = (logical(run / "checkpoints" / "step_00000004") for run in runs.values())
    assert found.keys() == wanted.keys()
    off = {name: float((found[name] - wanted[name]).norm() / wanted[name].norm()) for name in wanted}
    assert {name: error for name, error in off.items() if not error <= 1e-9} == {}
