"""Runs whose processes die at given moments of given steps."""

import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import mplug_heal.copies
import mplug_heal.relayouts
from mplug.config.sources import Settings
from mplug.distributed.supervision import Send
from mplug.distributed.world import attempt
from mplug.run.launching import launch
from mplug.run.metrics_file import METRICS, read_records
from mplug.run.prepare import prepare
from mplug.training.healing import healer_of
from mplug.training.job import Job, Outcome, supervisor_of, work
from mplug.training.loop import train
from mplug.training.metrics_writer import MetricsFile
from mplug.training.stepper import DefaultStepper
from mplug_heal.requests import ask
from mplug_saving import storage
from mplug_saving.saver import Saver
from mplug_steps.reduction import Reduction
from mplug_testing.harness import EXACT, as_rank, overrides_of, tiny_config, tiny_settings

STEPS = 6
SETTINGS = {
    "trainer.steps": STEPS,
    "trainer.precision": "fp64",
    "trainer.global_batch_size": 8,
    "trainer.device": "cpu",
    "checkpoint.every": 3,
    "extensions.heal.every": 2,
}
Death = tuple[int, int, str]
"""The step in which a process dies, its rank, and the moment."""


def overrides(settings: dict[str, Any]) -> Settings:
    return overrides_of({**SETTINGS, **settings})


def dying(job: Job, deaths: tuple[Death, ...], send: Send) -> Outcome:
    """The work of a process of a run; in the n-th attempt, the n-th death takes place."""
    if attempt() < len(deaths):
        step, rank, moment = deaths[attempt()]
        if rank == int(os.environ["RANK"]):
            PREPARED[moment](step)
    return work(job, send)


def _dies_before(owner: Any, name: str, step_of: Callable[[Any], int], step: int, by: int = signal.SIGKILL) -> None:
    method = getattr(owner, name)

    def replaced(self: Any, *arguments: Any, **named: Any) -> Any:
        if step_of(self) == step:
            os.kill(os.getpid(), by)
        return method(self, *arguments, **named)

    setattr(owner, name, replaced)


def writing_slowly(job: Job, deaths: tuple[Death, ...], send: Send) -> Outcome:
    """As `dying`; in the first attempt, rank 0 needs seconds to write the checkpoint of step 3."""
    write, is_slow = storage.save_file, attempt() == 0 and os.environ["RANK"] == "0"

    def save_file(tensors: Any, path: Path) -> None:
        if is_slow and "step_00000003" in str(path):
            time.sleep(4)
        write(tensors, path)

    storage.save_file = save_file
    return dying(job, deaths, send)


def _step(of: Any) -> int:
    return int(of.run.step)


def _dies_copying(step: int) -> None:
    """Die in a copy of the state, after the parts are copied and before the ranks have agreed on it."""
    _dies_before(mplug_heal.copies.Copying, "_backed", lambda _: STEP[0], step)
    _dies_before(DefaultStepper, "update", lambda stepper: STEP.__setitem__(0, stepper.run.step) or 0, -1)


def _raises(step: int) -> None:
    method = DefaultStepper.update

    def update(self: DefaultStepper, lr: float, weight_decay: float) -> Any:
        if self.run.step == step:
            raise ValueError("a fault of its own")
        return method(self, lr, weight_decay)

    DefaultStepper.update = update  # type: ignore[method-assign]


def _asks_and_dies(step: int) -> None:
    """Ask for another layout two steps before, and die under it."""
    apply, mplug_heal.relayouts.INTERVAL = DefaultStepper.apply, 0.0

    def asking(self: DefaultStepper, *arguments: Any) -> Any:
        if self.run.step == step - 2:
            assert self.run.directory is not None
            ask(self.run.directory, "fsdp2")
        if self.run.step == step:
            assert self.run.config.parallel.layout == "fsdp2"
            os.kill(os.getpid(), signal.SIGKILL)
        return apply(self, *arguments)

    DefaultStepper.apply = asking  # type: ignore[method-assign]


STEP = [0]
PREPARED: dict[str, Callable[[int], None]] = {
    "forward": lambda step: _dies_before(DefaultStepper, "entries", _step, step),
    "backward": lambda step: _dies_before(DefaultStepper, "loss_gradient", _step, step),
    "reduction": lambda step: _dies_before(Reduction, "finish", lambda one: one.run.step, step),
    "update": lambda step: _dies_before(DefaultStepper, "apply", _step, step),
    "save": lambda step: _dies_before(Saver, "save", _step, step),
    "copy": _dies_copying,
    "relayout": _asks_and_dies,
    "error": _raises,
    "stop": lambda step: _dies_before(DefaultStepper, "apply", _step, step, signal.SIGSTOP),
}


def healed(
    folder: Path, layout: str, settings: dict[str, Any], *deaths: Death, doing: Callable[..., Outcome] = dying
) -> Outcome:
    job = Job(tiny_settings(), overrides({**settings, "parallel.layout": layout}), folder / "runs" / "one", None)
    run = prepare(tiny_config({**SETTINGS, **settings, "parallel.layout": layout}))
    healer = healer_of(run)
    assert healer is not None
    healing = healer.plan(run, None, job.base, job.overrides)
    job = Job(job.base, job.overrides, job.directory, None, layouts=healing.layouts)
    found: Outcome = launch(run.mesh.world_size, doing, job, deaths, supervisor=supervisor_of(run), healing=healing)
    return found


def figures(folder: Path) -> list[dict[str, float]]:
    names = ("step", "loss", "grad_norm", "tokens", "val_loss")
    return [{name: record[name] for name in names if name in record} for record in read_records(folder / METRICS)]


def figures_of_one_process(folder: Path, settings: Settings) -> list[dict[str, float]]:
    """The steps of an undisturbed run of one process."""
    train(as_rank(prepare(tiny_config(settings), {"host/metrics": MetricsFile()}, folder)))
    return figures(folder)


def assert_figures(folder: Path, expected: list[dict[str, float]], steps: int) -> None:
    """The run in a folder has the steps that are expected, so many."""
    found = figures(folder / "runs" / "one")
    assert len(found) == len(expected) == steps
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, rel=EXACT)


def continued_after(folder: Path) -> list[int]:
    """The steps after which rank 0 has continued from copies."""
    text = (folder / "runs" / "one" / "logs" / "rank0.log").read_text()
    return [int(step) for step in re.findall(r"the run continues after step (\d+), from the copies", text)]
