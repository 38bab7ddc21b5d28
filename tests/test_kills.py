"""Whatever moment all processes of a run die at, the newest complete checkpoint is whole, and the run goes on."""

import os
import random
import shutil
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from mplug_testing import WorkerFailed, run_workers

from mplug.checkpoint.folder import complete, newest
from mplug.checkpoint.names import path_of, step_of

NUMBER = 50
"""How many points the quick tests and those of `pytest --wide kills` try together."""
QUICK = {2, 21}
"""The points of the quick tests: every layout, within a step, and before, inside and after the parts of a save."""
STEPS, EVERY = 6, 2
SETTINGS = {
    "model.num_layers": 2,
    "model.dropout": 0.1,
    "trainer.steps": STEPS,
    "trainer.eval_every": 0,
    "checkpoint.every": EVERY,
    "checkpoint.keep": 2,
}
LAYOUTS = {"tp2pp2": 4, "dp2tp2": 4, "": 1, "tp4": 4}
"""The layouts, in the order in which a run that dies goes over from one to the next, and their processes."""
Same = Callable[[Path, Path], None]


@dataclass(frozen=True)
class Point:
    """When to die: in the `nth` of the calls that `where` names, counted over the run, before or after or inside it."""

    where: str
    nth: int
    when: str
    asynchronous: bool

    def __str__(self) -> str:
        how = "asynchronous" if self.asynchronous else "synchronous"
        return f"{self.when} call {self.nth} of {self.where} ({how})"


BETWEEN = {"forward_backward": STEPS, "update": STEPS}
"""What a step does, and how often a run does it."""
INSIDE = {"mkdir": 3, "save_file": 3, "fsync": 9, "crc32": 3, "write_whole": 3, "rename": 4, "rmtree": 1}
"""What rank 0 does to save, and how often a run of three saves, of which it keeps two, does it."""


def points(number: int) -> list[Point]:
    """Seeded points, half of them inside a save."""
    draw = random.Random(20260)
    found = []
    for index in range(number):
        calls = INSIDE if index % 2 else BETWEEN
        where = draw.choice(list(calls))
        when = draw.choice(["before", "inside", "after"] if where == "save_file" else ["before", "after"])
        found.append(Point(where, draw.randint(1, calls[where]), when, draw.random() < 0.5))
    return found


def train(layout: str, directory: Path, resume: bool, point: Point | None, asynchronous: bool) -> list[float]:
    """Be a rank of a run, and die at a point. Returns the losses of the steps that it did."""
    from mplug_testing.harness import tiny_config

    from mplug import hookimpl
    from mplug.distributed.groups import Groups
    from mplug.run.prepare import prepare
    from mplug.run.run import Run
    from mplug.training import loop

    losses: list[float] = []

    class Losses:
        @hookimpl
        def step_finished(self, record: dict[str, Any]) -> None:
            losses.append(record["loss"])

    settings = {**SETTINGS, "trainer.precision": "fp64", "parallel.layout": layout}
    settings |= {"checkpoint.asynchronous": asynchronous}
    run: Run = prepare(tiny_config(settings), {"host/losses": Losses()}, directory)
    if run.mesh.world_size > 1:
        run.rank, run.groups = dist.get_rank(), Groups(dist.get_rank())
    if point is not None:
        pids: list[int] = [0] * dist.get_world_size()
        dist.all_gather_object(pids, os.getpid())
        if run.rank == 0:
            arm(point, pids)
    loop.train(run, newest(run.checkpoints) if resume else None)
    return losses


def arm(point: Point, pids: list[int]) -> None:
    """Make a call kill all processes of the run."""
    from mplug.checkpoint import storage
    from mplug.training.stepper import DefaultStepper

    places: dict[str, tuple[Any, str]] = {
        "forward_backward": (DefaultStepper, "begin_step"),
        "update": (DefaultStepper, "update"),
        "mkdir": (Path, "mkdir"),
        "save_file": (storage, "save_file"),
        "fsync": (os, "fsync"),
        "crc32": (storage, "crc32"),
        "write_whole": (storage, "write_whole"),
        "rename": (Path, "rename"),
        "rmtree": (shutil, "rmtree"),
    }
    owner, name = places[point.where]
    original: Callable[..., Any] = getattr(owner, name)
    calls = 0

    def call(*arguments: Any, **named: Any) -> Any:
        nonlocal calls
        if point.where in INSIDE and not any("step_" in str(argument) for argument in arguments) and name != "fsync":
            return original(*arguments, **named)
        calls += 1
        if calls == point.nth and point.when == "before":
            die(pids)
        result = original(*arguments, **named)
        if calls == point.nth:
            if point.when == "inside":
                path = arguments[1]
                os.truncate(path, path.stat().st_size // 2)
            die(pids)
        return result

    setattr(owner, name, call)


def die(pids: list[int]) -> None:
    """Kill every process of the run, this one last."""
    for pid in [*(pid for pid in pids if pid != os.getpid()), os.getpid()]:
        os.kill(pid, signal.SIGKILL)


# The comparison.


@dataclass(frozen=True)
class Whole:
    """A run that nothing disturbed: its losses, and the folder in which all its checkpoints are."""

    losses: list[float]
    checkpoints: Path


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Whole]:
    """The undisturbed run under a layout, made once."""
    made: dict[str, Whole] = {}

    def whole(layout: str) -> Whole:
        if layout not in made:
            folder, kept = tmp_path_factory.mktemp("whole"), tmp_path_factory.mktemp("kept")
            losses = run_workers(LAYOUTS[layout], keeping_all, layout, folder, kept)[0]
            made[layout] = Whole(losses, kept)
        return made[layout]

    return whole


def keeping_all(layout: str, directory: Path, kept: Path) -> list[float]:
    """Train undisturbed; rank 0 copies every checkpoint before it may be removed."""
    SETTINGS["checkpoint.keep"] = STEPS
    losses = train(layout, directory, False, None, False)
    if dist.get_rank() == 0:
        shutil.copytree(directory / "checkpoints", kept, dirs_exist_ok=True)
    return losses


def assert_nothing_lost(directory: Path, reference: Whole, assert_bitwise: Same) -> Path | None:
    """Every visible checkpoint is bitwise what the undisturbed run saved; returns the newest."""
    found = complete(directory / "checkpoints")
    for path in found:
        assert_bitwise(path, path_of(reference.checkpoints, step_of(path)))
    return found[-1] if found else None


CASES = [
    pytest.param(index, point, marks=[pytest.mark.wide("kills")] if index not in QUICK else [], id=f"{index}-{point}")
    for index, point in enumerate(points(NUMBER))
]


@pytest.mark.parametrize(("index", "point"), CASES)
def test_a_run_that_dies_goes_on_from_its_newest_checkpoint_as_if_nothing_had_happened(
    tmp_path: Path, undisturbed: Callable[[str], Whole], assert_bitwise: Same, index: int, point: Point
) -> None:
    layouts = list(LAYOUTS)
    layout, following = layouts[index % 4], layouts[(index + 1) % 4]
    reference, directory = undisturbed(layout), tmp_path / "run"
    with pytest.raises(WorkerFailed, match="died of SIGKILL"):
        run_workers(LAYOUTS[layout], train, layout, directory, False, point, point.asynchronous)
    saved = assert_nothing_lost(directory, reference, assert_bitwise)
    done = step_of(saved) if saved else 0
    if done == STEPS:  # it died when all was saved
        return
    if index % 3 == 0 and saved:  # under another layout
        losses = run_workers(LAYOUTS[following], train, following, directory, True, None, point.asynchronous)[0]
        assert losses == pytest.approx(reference.losses[done:], rel=1e-10)
        return
    losses = run_workers(LAYOUTS[layout], train, layout, directory, saved is not None, None, point.asynchronous)[0]
    assert losses == reference.losses[done:]
    assert_bitwise(newest(directory / "checkpoints"), path_of(reference.checkpoints, STEPS))
    assert [path.name for path in (directory / "checkpoints").glob(".*")] == [], "nothing half-written is left"
