"""`checkpoint.every=auto`: the interval of Daly by what is measured, the same on all ranks, and what the run says."""

from collections.abc import Callable
from pathlib import Path

import pytest

import mplug_heal.save_times
from mplug import hookimpl
from mplug.run.prepare import prepare
from mplug.run.run import Run
from mplug.training.loop import train
from mplug_heal.intervals import best_interval, lost_share
from mplug_heal.save_times import FIRST, OptimalSaves, mean_seconds
from mplug_saving.folder import complete
from mplug_saving.names import step_of
from mplug_testing import run_workers
from mplug_testing.harness import as_rank, tiny_config

HOUR = 3600.0


@pytest.mark.parametrize(("stall", "minutes", "share"), [(60, 19, 0.10), (3, 4.3, 0.023)])
def test_the_interval_and_the_loss_are_those_of_the_formulas_at_a_failure_in_3_1_hours(
    stall: float, minutes: float, share: float
) -> None:
    interval = best_interval(stall, 3.1 * HOUR)
    assert interval / 60 == pytest.approx(minutes, rel=0.03)
    assert lost_share(stall, interval, 3.1 * HOUR) == pytest.approx(share, rel=0.04)


def test_no_interval_of_a_fine_scale_loses_less_by_the_exact_model() -> None:
    """Of the exact model: exponential failures, and a failure may hit a save (Daly, equation 13, without restarts)."""
    from math import expm1

    stall, mean = 30.0, 1200.0

    def time_per_work(interval: float) -> float:
        return mean * expm1((interval + stall) / mean) / interval

    best = best_interval(stall, mean)
    least = min(time_per_work(10.0 * number) for number in range(1, 200))
    assert time_per_work(best) == pytest.approx(least, rel=1e-3)


def test_a_save_that_takes_longer_than_two_times_between_failures_is_made_once_in_such_a_time() -> None:
    assert best_interval(100.0, 40.0) == 40.0


def test_the_default_rate_is_that_of_16384_gpus_divided_by_the_ranks() -> None:
    run = prepare(tiny_config({"checkpoint.every": "auto"}))
    assert mean_seconds(run) == 50_700 * HOUR
    assert pytest.approx(3.1, rel=0.01) == 50_700 / 16_384
    own = prepare(tiny_config({"checkpoint.every": "auto", "checkpoint.hours_between_failures": 0.5}))
    assert mean_seconds(own) == 0.5 * HOUR


class Clock:
    """A clock by which every step takes `seconds`; saves take no time by it."""

    def __init__(self, seconds: float) -> None:
        self.now, self.seconds = 0.0, seconds

    @hookimpl
    def step_started(self) -> None:
        self.now += self.seconds


def saves(folder: str, layout: str, seconds: Callable[[int], float]) -> list[int]:
    """Be one rank: the steps of the checkpoints of a run with a failure in 100 s and saves that stall for 2 s."""
    settings = {
        "trainer.steps": 31,
        "trainer.eval_every": 0,
        "checkpoint.every": "auto",
        "checkpoint.keep": 99,
        "checkpoint.asynchronous": False,
        "checkpoint.hours_between_failures": 100 / HOUR,
        "parallel.layout": layout,
    }
    rank = as_rank(prepare(tiny_config({"parallel.layout": layout}))).rank
    clock = Clock(seconds(rank))
    run = as_rank(prepare(tiny_config(settings), {"host/clock": clock}, Path(folder)))
    saved = OptimalSaves.saved

    def with_stall(self: OptimalSaves, run: Run, stall: float, durable: float) -> None:
        clock.now += 2.0
        saved(self, run, 2.0, 0.0)

    mplug_heal.save_times.OptimalSaves.saved = with_stall  # type: ignore[method-assign]
    mplug_heal.save_times.OptimalSaves.__init__.__defaults__ = (lambda: clock.now,)
    train(run)
    return [step_of(path) for path in complete(Path(folder) / "checkpoints")]


def steps_of_a_second(rank: int) -> float:
    """Rank 1's clock says that steps take 5 s."""
    return 1.0 if rank == 0 else 5.0


def test_all_ranks_save_at_the_interval_that_rank_0_measures(tmp_path: Path) -> None:
    first = 1 + FIRST
    interval = 19  # sqrt(2 * 2 * 100) * (1 + 0.1 / 3 + 0.01 / 9) - 2 = 18.69
    assert run_workers(2, saves, str(tmp_path), "dp2", steps_of_a_second) == [[first, first + interval, 31]] * 2


def test_the_run_says_what_a_failure_loses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = prepare(tiny_config({"checkpoint.every": "auto", "checkpoint.hours_between_failures": 100 / HOUR}))
    now = [0.0]
    times = OptimalSaves(lambda: now[0])
    run.step = 1
    assert not times.is_due(run)
    run.step, now[0] = 11, 10.0
    assert times.is_due(run)
    now[0] += 2.0
    times.saved(run, 2.0, 0.0)
    assert capsys.readouterr().err == (
        "mplug: the next checkpoint follows after 19 steps (19.00 s): a save stops training for 2.00 s, and the run "
        "expects a failure every 100.00 s; a failure loses 9.50 s of training on average, at most 19.00 s; saves and "
        "repeated steps take 20.03% of the time\n"
    )
    run.step, now[0] = 29, 30.0
    assert not times.is_due(run)
    run.step = 30
    assert times.is_due(run)


def test_the_next_save_does_not_begin_before_the_last_one_is_complete() -> None:
    run = prepare(tiny_config({"checkpoint.every": "auto", "checkpoint.hours_between_failures": 100 / HOUR}))
    now = [0.0]
    times = OptimalSaves(lambda: now[0])
    run.step = 1
    times.is_due(run)
    run.step, now[0] = 11, 12.0
    times.saved(run, 2.0, 50.0)
    run.step = 11 + 49
    assert not times.is_due(run)
    run.step = 11 + 50
    assert times.is_due(run)


def next_save_after_a_pause(pause: float, excluded: float) -> int:
    """The step at which a run saves again, whose ten steps of a second took `pause` seconds longer."""
    run, clock = as_rank(prepare(tiny_config({"checkpoint.hours_between_failures": 0.1}))), Clock(1.0)
    times = OptimalSaves(lambda: clock.now)
    run.step = 1
    times.is_due(run)
    run.step, clock.now = 1 + FIRST, FIRST + pause
    times.exclude(excluded)
    times.saved(run, 0.0001, 5.0)
    return next(step for step in range(run.step, 10**6) if setattr(run, "step", step) or times.is_due(run))


def test_a_pause_for_a_change_of_the_layout_is_no_time_of_steps() -> None:
    assert next_save_after_a_pause(90.0, 90.0) == next_save_after_a_pause(0.0, 0.0) == 1 + FIRST + 6
    assert next_save_after_a_pause(90.0, 0.0) < 1 + FIRST + 6
