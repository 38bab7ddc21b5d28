"""Whatever happens to the folder of a run, no valid checkpoint is lost and the next run goes on.

The faults are crafted and damaged checkpoints, deaths between two system calls of a save, which leave a lock too, and
kills of whole runs. After each of them a command that meets a bad checkpoint ends in one sentence, and the next run
takes the lock, continues from the newest valid checkpoint, names those that it skips, and leaves only valid ones.

    MPLUG_KILLS=200 MPLUG_DAMAGED=50 pytest -n 8 --wide kills tests/test_faults.py

A journey is one run: its processes are killed at random moments, half of them inside a save, and each life continues
from the newest valid checkpoint. The numbers are divided among journeys of LIVES kills, of every layout and `keep`.
The last life of some journeys continues under another layout. The quick journeys die inside of saves only.
"""

import json
import os
import random
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cache
from itertools import product
from math import ceil
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from checkpoints import SMALL, dies, flip_bit, position_of, save, steps, valid, valid_in
from command_line import Cli
from crafts import CRAFTS, change

from mplug import hookimpl
from mplug.errors import UsageError
from mplug.run.prepare import prepare
from mplug.run.run import Run
from mplug.training import loop
from mplug_pretrained.inference import load_for_inference
from mplug_pretrained.weights import pretrained_of, refuse_another_model
from mplug_saving.folder import complete, newest, read_described, read_manifest, read_valid
from mplug_saving.lock import take
from mplug_saving.names import path_of, step_of
from mplug_testing import WorkerFailed, run_workers
from mplug_testing.harness import as_rank, tiny_config

Same = Callable[[Path, Path], None]


def survivors(folder: Path, known: list[Path]) -> list[Path]:
    """The valid checkpoints after a fault. The newest that was valid before is still there, or a newer one is."""
    found = valid_in(folder)
    assert found or not known, "a valid checkpoint was there, and none is left"
    assert not known or step_of(found[-1]) >= step_of(known[-1])
    return found


def goes_on(directory: Path, keep: int) -> None:
    """The next run takes the lock, continues from the newest valid checkpoint, and leaves the newest valid ones."""
    folder = directory / "checkpoints"
    found, later, position = valid_in(folder), complete(folder), position_of(directory, keep)
    claim = take(directory, lambda sentence: pytest.fail(f"nothing to wait for: {sentence}"))
    choice = position.choose(later[-1])
    assert choice.path == found[-1]
    skipped = later[later.index(found[-1]) + 1 :]
    assert len(choice.skipped) == len(skipped)
    for reason, path in zip(choice.skipped, reversed(skipped), strict=True):
        assert str(path) in reason
        assert "\n" not in reason
    position.load(choice)
    save(position, position.run.step + 1, samples=4444)
    claim.release()
    assert complete(folder) == valid_in(folder)
    assert read_manifest(newest(folder))["samples"] == 4444
    assert len(complete(folder)) == min(keep, len(found) + 1)
    assert not (directory / ".lock").exists()
    assert [path.name for path in folder.glob(".*")] == []
    assert {len(list(path.iterdir())) for path in complete(folder)} == {2}


# Bad checkpoints.


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "runs" / "one"
    loop.train(prepare(tiny_config({**SMALL, "trainer.steps": 2, "checkpoint.keep": 2}), directory=folder))
    return folder


@pytest.fixture
def crafted(saved: Path, tmp_path: Path) -> Path:
    shutil.copytree(saved, tmp_path / "runs" / "one")
    return path_of(tmp_path / "runs" / "one" / "checkpoints", 2)


def begin_with(path: Path) -> None:
    run = prepare(tiny_config({**SMALL, "checkpoint.pretrained": str(path)}))
    assert pretrained_of(run) == path
    refuse_another_model(path, None)  # type: ignore[arg-type]  # the manifest comes first


READERS: dict[str, Callable[[Path], object]] = {
    "verify": read_valid,
    "show and list": read_described,
    "generate": lambda path: load_for_inference(prepare(tiny_config(SMALL)), path),
}
READ_TO_BEGIN = {"a gap", "a pipe as manifest", "a name above the folder", "lists without end"}
"""Crafts that are refused by the manifest alone, by which a run begins with given weights."""
NOTHING = {"nothing": (lambda path: change(path, lambda _: None), "")}


@pytest.mark.parametrize("craft", [*CRAFTS, *NOTHING])
@pytest.mark.wide("kills", quick=[*[*CRAFTS][::4], "a number that has changed", *NOTHING])
def test_a_bad_checkpoint_is_refused_in_one_sentence_and_the_next_run_goes_on(crafted: Path, craft: str) -> None:
    make, reason = (CRAFTS | NOTHING)[craft]
    make(crafted)
    for read in (*READERS.values(), *([begin_with] if craft in READ_TO_BEGIN else [])):
        with pytest.raises(UsageError, match=reason) if reason else nullcontext() as raised:
            read(crafted)
        assert not reason or (len(str(raised.value).splitlines()) == 1 and str(crafted) in str(raised.value))
    assert valid(crafted.parent) == ([1] if reason else [1, 2])
    goes_on(crafted.parents[1], keep=2)


COMMANDS = {
    "verify": ("checkpoint", "verify"),
    "show": ("checkpoint", "show", "--step", "2"),
    "generate": ("generate", "--tokens", "1", "--prompt", "a", "--step", "2"),
    "list": ("checkpoint", "list"),
    "train": ("train", "--resume", "--set", "trainer.steps=3"),
}
QUICK_COMMANDS = [("a gap", "verify"), ("a gap", "show"), ("a gap", "generate"), ("a pipe as manifest", "list")]
QUICK_COMMANDS += [("half a character in a name", "list")]
WIDE_COMMANDS = [pair for pair in product(CRAFTS, COMMANDS) if pair not in QUICK_COMMANDS]


@pytest.mark.parametrize(
    ("craft", "command"),
    [*QUICK_COMMANDS, *(pytest.param(*pair, marks=pytest.mark.wide("kills")) for pair in WIDE_COMMANDS)],
)
def test_no_command_shows_a_traceback_or_hangs(cli: Cli, crafted: Path, craft: str, command: str) -> None:
    CRAFTS[craft][0](crafted)
    result = cli(*COMMANDS[command], timeout=60)
    assert "Traceback" not in result.stdout + result.stderr
    if command == "train":
        is_another_models = "but the model has" in result.stderr  # refused by the manifest, before any file is read
        assert result.returncode == (2 if is_another_models else 0)
        assert is_another_models or "skipped: checkpoint" in result.stderr
    elif command == "list":
        assert "is damaged" in result.stdout
    else:
        assert result.returncode == 2, result.stdout


# Deaths between two system calls of a save.


@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.wide("kills")), 9])
@pytest.mark.parametrize("case", ["a replaced checkpoint", "an old checkpoint", "a damaged later checkpoint"])
@pytest.mark.wide("kills", quick=["a damaged later checkpoint-9"])
def test_a_process_that_dies_in_a_save_leaves_a_valid_checkpoint_and_the_next_run_goes_on(
    tmp_path: Path, case: str, every: int
) -> None:
    run, folder, backup = tmp_path / "run", tmp_path / "run" / "checkpoints", tmp_path / "backup"
    position = position_of(run, 1)
    save(position, 5, 1)
    step = 5 if case == "a replaced checkpoint" else 6
    if case == "a damaged later checkpoint":
        shutil.copytree(path_of(folder, 5), path_of(folder, 7))
        position = position_of(run, 1, path_of(folder, 5))
    known = valid_in(folder)
    folder.rename(backup)

    def saves() -> None:
        take(run, print)
        save(position, step, 2)

    for call in range(1, 200, every):
        shutil.copytree(backup, folder, copy_function=os.link)
        died = dies(saves, call)
        assert set(map(step_of, survivors(folder, known))) <= {5, step}
        assert case != "a replaced checkpoint" or steps(folder) == [5]
        goes_on(run, keep=1)
        shutil.rmtree(folder)
        if not died:
            assert call > 20
            return
    raise AssertionError("the process has made more calls than were tried")


# Kills of whole runs.


KILLS, DAMAGED = int(os.environ.get("MPLUG_KILLS", "12")), int(os.environ.get("MPLUG_DAMAGED", "6"))
"""Kills and damaged checkpoints of all journeys together."""
SEED = int(os.environ.get("MPLUG_KILLS_SEED", "19"))
LAYOUTS = {"": 1, "zero2": 2, "tp2pp2": 4}
COURSES = [(layout, keep) for layout in LAYOUTS for keep in (1, 2)]
LIVES = 10
STEPS = 8
SETTINGS = {**SMALL, "model.num_layers": 2, "model.dropout": 0.1, "trainer.steps": STEPS, "trainer.precision": "fp64"}


@dataclass(frozen=True)
class Moment:
    """When all processes of a life die: after a share of a life's time, or of its system calls inside saves."""

    share: float
    inside_a_save: bool


@dataclass
class Watch:
    """Counts the system calls on checkpoints; what dies at one of them dies before it."""

    die: Callable[[], None]
    die_at: int | None = None
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
    losses: list[float] = []

    class Noting:
        @hookimpl
        def run_started(self, run: Run) -> None:
            if run.rank == 0:
                (directory / "begun").write_text(str(run.step))

        @hookimpl
        def step_finished(self, record: dict[str, Any]) -> None:
            losses.append(record["loss"])

    settings = {**SETTINGS, "parallel.layout": layout, "checkpoint.keep": keep, "checkpoint.asynchronous": asynchronous}
    run = prepare(tiny_config(settings), {"host/noting": Noting()}, directory)
    pids: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(pids, os.getpid())
    run, watch = as_rank(run), Watch(lambda: die(pids))
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
    for pid in sorted(pids, key=os.getpid().__eq__):
        os.kill(pid, signal.SIGKILL)


def damage(path: Path, draw: random.Random) -> None:
    file = draw.choice(sorted(path.iterdir()))
    size, kind = file.stat().st_size, draw.choice(["flip", "truncate", "remove", "empty", "lengthen"])
    if kind == "flip":
        flip_bit(file, draw.randrange(size), draw.randrange(8))
    elif kind == "remove":
        file.unlink()
    else:
        os.truncate(file, {"truncate": draw.randrange(size), "empty": 0, "lengthen": size + 1}[kind])


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Life, Path]]:
    """The undisturbed run under a layout, made once, and the folder that has all its checkpoints."""

    @cache
    def whole(layout: str) -> tuple[Life, Path]:
        folder = tmp_path_factory.mktemp("whole")
        return run_workers(LAYOUTS[layout], live, layout, folder, STEPS, False, None, None)[0], folder / "checkpoints"

    return whole


QUICK = [
    pytest.param("tp2pp2", "tp2pp2", 1, 3, 1, 0, 0.0, id="quick-tp2pp2"),
    pytest.param("zero2", "", 2, 4, 2, 0, 0.0, id="quick-zero2", marks=pytest.mark.wide("kills")),
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
        values = (layout, list(LAYOUTS)[n % len(LAYOUTS)], keep, SEED + n, kills[n], damaged[n], 0.5)
        found.append(pytest.param(*values, marks=pytest.mark.wide("kills"), id=f"{n}-{layout}-{keep}"))
    return found


@pytest.mark.parametrize(("layout", "last", "keep", "seed", "kills", "damaged", "by_time"), [*QUICK, *shares()])
@pytest.mark.wide("kills")
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
            kills, done, losses = max(0, kills - 1), done + 1, None
        if (directory / "begun").exists():
            assert int((directory / "begun").read_text()) == begins, "it continues from the newest valid checkpoint"
        found = survivors(directory / "checkpoints", known)
        for path in found:
            assert_bitwise(path, path_of(reference, step_of(path)))
        if losses is not None or (found and step_of(found[-1]) == STEPS):
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
