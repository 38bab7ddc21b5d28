"""Runs that are killed many times, and whose newest checkpoint is damaged, end like a run that nothing disturbed.

    MPLUG_KILLS=200 MPLUG_DAMAGED=50 pytest -n 8 --wide kills tests/test_kills.py

A journey is one run: its processes are killed at random moments, half of them inside a save, and each life continues
from the newest valid checkpoint. The numbers are divided among journeys of LIVES kills, of every layout and `keep`.
The last life of some journeys continues under another layout. The quick journeys die inside of saves only.
"""

import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from checkpoints import flip_bit, valid_in

from mplug.checkpoint.folder import complete, newest
from mplug.checkpoint.names import path_of, step_of
from mplug_testing import WorkerFailed, run_workers

KILLS, DAMAGED = int(os.environ.get("MPLUG_KILLS", "12")), int(os.environ.get("MPLUG_DAMAGED", "6"))
"""Kills and damaged checkpoints of all journeys together."""
SEED = int(os.environ.get("MPLUG_KILLS_SEED", "19"))
LAYOUTS = {"": 1, "zero2": 2, "tp2pp2": 4}
COURSES = [(layout, keep) for layout in LAYOUTS for keep in (1, 2)]
LIVES = 10
STEPS = 8
SETTINGS = {
    "model.num_layers": 2,
    "model.dropout": 0.1,
    "trainer.steps": STEPS,
    "trainer.eval_every": 0,
    "trainer.precision": "fp64",
    "checkpoint.every": 1,
}
Same = Callable[[Path, Path], None]


@dataclass(frozen=True)
class Moment:
    """When all processes of a life die: after a share of a life's time, or of its system calls inside saves."""

    share: float
    inside_a_save: bool


@dataclass
class Watch:
    """Counts the system calls on checkpoints; what dies at one of them dies before it."""

    die_at: int | None
    die: Callable[[], None]
    calls: int = 0
    lock: Any = field(default_factory=threading.Lock)

    def hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event.startswith(("os.", "open", "shutil.")) and any("step_" in str(one) for one in arguments):
            with self.lock:
                self.calls += 1
                if self.calls == self.die_at:
                    self.die()


@dataclass(frozen=True)
class Life:
    """What an undisturbed run does: losses, seconds, and system calls on checkpoints."""

    losses: list[float]
    seconds: float
    calls: int


def live(layout: str, directory: Path, keep: int, asynchronous: bool, moment: Moment | None, whole: Any) -> Life:
    """Be a rank of a run that continues where it can, and dies at a moment."""
    from mplug import hookimpl
    from mplug.distributed.groups import Groups
    from mplug.run.prepare import prepare
    from mplug.run.run import Run
    from mplug.training import loop
    from mplug_testing.harness import tiny_config

    losses: list[float] = []

    class Told:
        @hookimpl
        def run_started(self, run: Run) -> None:
            if run.rank == 0:
                (directory / "begun").write_text(str(run.step))

        @hookimpl
        def step_finished(self, record: dict[str, Any]) -> None:
            losses.append(record["loss"])

    settings = {**SETTINGS, "parallel.layout": layout, "checkpoint.keep": keep, "checkpoint.asynchronous": asynchronous}
    run: Run = prepare(tiny_config(settings), {"host/told": Told()}, directory)
    pids: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(pids, os.getpid())
    if run.mesh.world_size > 1:
        run.rank, run.groups = dist.get_rank(), Groups(dist.get_rank())
    watch = Watch(None, lambda: die(pids))
    if run.rank == 0:
        if moment is not None and moment.inside_a_save:
            watch.die_at = 1 + int(moment.share * whole.calls)
        elif moment is not None:
            timer = threading.Timer(moment.share * whole.seconds, watch.die)
            timer.daemon = True
            timer.start()
        sys.addaudithook(watch.hear)
    began, found = time.monotonic(), complete(run.checkpoints)
    loop.train(run, found[-1] if found else None)
    return Life(losses, time.monotonic() - began, watch.calls)


def die(pids: list[int]) -> None:
    """Kill every process of the run, this one last."""
    for pid in [*(pid for pid in pids if pid != os.getpid()), os.getpid()]:
        os.kill(pid, signal.SIGKILL)


# Damage.


def damage(path: Path, draw: random.Random) -> None:
    """Damage a file of a checkpoint in one of the ways of disks and copies."""
    file = draw.choice(sorted(path.iterdir()))
    kind = draw.choice(["flip", "truncate", "remove", "empty", "lengthen"])
    if kind == "flip":
        flip_bit(file, draw.randrange(file.stat().st_size), draw.randrange(8))
    elif kind == "truncate":
        os.truncate(file, draw.randrange(file.stat().st_size))
    elif kind == "remove":
        file.unlink()
    elif kind == "empty":
        os.truncate(file, 0)
    else:
        with file.open("ab") as end:
            end.write(b"\0")


# Journeys.


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Life, Path]]:
    """The undisturbed run under a layout, made once, and the folder that has all its checkpoints."""
    made: dict[str, tuple[Life, Path]] = {}

    def whole(layout: str) -> tuple[Life, Path]:
        if layout not in made:
            folder = tmp_path_factory.mktemp("whole")
            life = run_workers(LAYOUTS[layout], live, layout, folder, STEPS, False, None, None)[0]
            made[layout] = (life, folder / "checkpoints")
        return made[layout]

    return whole


QUICK = [
    pytest.param("tp2pp2", "tp2pp2", 1, 3, 1, 0, 0.0, id="quick-tp2pp2"),
    pytest.param("zero2", "", 2, 4, 2, 0, 0.0, id="quick-zero2"),
]


def shares() -> list[Any]:
    """(layout, layout of the last life, keep, seed, kills, damaged checkpoints, moments by time) of every journey."""
    journeys = max(len(COURSES), ceil(KILLS / LIVES))
    kills, damaged = (
        [total * (n + 1) // journeys - total * n // journeys for n in range(journeys)] for total in (KILLS, DAMAGED)
    )
    found = []
    for n in range(journeys):
        layout, keep = COURSES[n % len(COURSES)]
        last = list(LAYOUTS)[n % len(LAYOUTS)]
        values = (layout, last, keep, SEED + n, kills[n], damaged[n], 0.5)
        found.append(pytest.param(*values, marks=pytest.mark.wide("kills"), id=f"{n}-{COURSES[n % len(COURSES)]}"))
    return found


@pytest.mark.parametrize(("layout", "last", "keep", "seed", "kills", "damaged", "by_time"), [*QUICK, *shares()])
def test_a_run_that_is_killed_many_times_ends_like_one_that_nothing_disturbed(
    tmp_path: Path,
    undisturbed: Callable[[str], tuple[Life, Path]],
    assert_bitwise: Same,
    layout: str,
    last: str,
    keep: int,
    seed: int,
    kills: int,
    damaged: int,
    by_time: float,
) -> None:
    whole, reference = undisturbed(layout)
    draw, number, done = random.Random(seed), 0, 0
    directory, known = tmp_path / "run0", list[Path]()
    while kills or damaged:
        for_damage = damaged > 0  # this life keeps two, so that the next one can go back to the older
        moment = Moment(draw.uniform(0.2, 1.0) if for_damage else draw.random(), draw.random() >= by_time)
        begins = step_of(known[-1]) if known else 0
        (directory / "begun").unlink(missing_ok=True)
        arguments = (layout, directory, 2 if for_damage else keep, draw.random() < 0.5, moment, whole)
        try:
            losses = run_workers(LAYOUTS[layout], live, *arguments)[0].losses
        except WorkerFailed as failure:
            if "SIGKILL" not in str(failure):
                raise
            kills = max(0, kills - 1)
            done += 1
            losses = None
        if (directory / "begun").exists():
            assert int((directory / "begun").read_text()) == begins, "it continues from the newest valid checkpoint"
        found = valid_in(directory / "checkpoints")
        assert found or not known, "a valid checkpoint was there, and none is left"
        assert not known or step_of(found[-1]) >= begins
        for path in found:
            assert_bitwise(path, path_of(reference, step_of(path)))
        if losses is not None or step_of(found[-1] if found else path_of(tmp_path, 0)) == STEPS:
            assert losses is None or losses == whole.losses[begins:]
            number += 1
            directory, known = tmp_path / f"run{number}", []
            continue
        if damaged and len(found) > 1:
            damage(found[-1], draw)
            assert valid_in(directory / "checkpoints") == found[:-1]
            found, damaged = found[:-1], damaged - 1
        known = found
    begins = step_of(known[-1]) if known else 0
    losses = run_workers(LAYOUTS[last], live, last, directory, keep, True, None, None)[0].losses
    folder = directory / "checkpoints"
    if last == layout:
        assert losses == whole.losses[begins:]
        assert_bitwise(newest(folder), path_of(reference, STEPS))
    else:
        assert losses == pytest.approx(whole.losses[begins:], rel=1e-10)
    assert complete(folder) == valid_in(folder)
    assert len(complete(folder)) == min(keep, STEPS - begins + len(known))
    assert [path.name for path in folder.glob(".*")] == []
    print(json.dumps({"layout": layout, "keep": keep, "kills": done, "seed": seed}))
