"""Learning rate, weight decay and batch size as functions of the step."""

import math
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mplug.config.defaults import default_settings
from mplug.config.host_sections import BatchRampup, Schedule, Trainer, WeightDecay
from mplug.config.sources import nested
from mplug.training.schedule import batch_size, learning_rate, weight_decay

CONSTANT_DECAY = WeightDecay(name="constant", end=None)
NO_RAMPUP = BatchRampup(start=None, increment=1, samples=0)
SHAPES = ["constant", "linear", "cosine", "inverse_sqrt", "wsd", "wsd_sqrt", "wsd_cosine"]


def schedule(name: Any, warmup_steps: int = 0, decay_steps: int | None = None, min_lr: float = 0.0) -> Schedule:
    given = {"warmup_steps": warmup_steps, "decay_steps": decay_steps, "min_lr": min_lr}
    return Schedule(name=name, weight_decay=CONSTANT_DECAY, batch_rampup=NO_RAMPUP, **given)


DEFAULT = nested(default_settings())["trainer"]


def trainer(global_batch_size: int) -> Trainer:
    return Trainer(**{**DEFAULT, "global_batch_size": global_batch_size})


# Learning rate, at points computed by hand: (shape, step of 100, expected) with peak 1.


@pytest.mark.parametrize("name", SHAPES)
def test_the_rate_rises_linearly_to_the_peak_over_the_warm_up(name: str) -> None:
    shape = schedule(name, warmup_steps=4, min_lr=0.5)
    assert [learning_rate(step, 2.0, shape, 100) for step in (1, 2, 3, 4)] == pytest.approx([0.5, 1.0, 1.5, 2.0])


@pytest.mark.parametrize(
    ("shape", "points"),
    [
        (schedule("constant"), {1: 1.0, 50: 1.0, 100: 1.0}),
        (schedule("constant", warmup_steps=10, min_lr=0.2), {10: 1.0, 11: 1.0, 100: 1.0}),
        (schedule("linear"), {25: 0.75, 50: 0.5, 100: 0.0}),
        (schedule("linear", warmup_steps=20), {20: 1.0, 40: 0.75, 60: 0.5, 100: 0.0}),
        (schedule("linear", warmup_steps=20, min_lr=0.2), {60: 0.6, 100: 0.2}),
        (schedule("linear", warmup_steps=20, decay_steps=40, min_lr=0.2), {40: 0.6, 60: 0.2, 61: 0.2, 100: 0.2}),
        (schedule("cosine"), {50: 0.5, 100: 0.0, 25: (1 + math.sqrt(0.5)) / 2}),
        (schedule("cosine", warmup_steps=40, min_lr=0.1), {40: 1.0, 60: 0.775, 70: 0.55, 80: 0.325, 100: 0.1}),
        (schedule("cosine", warmup_steps=10, decay_steps=30), {20: 0.75, 25: 0.5, 40: 0.0, 90: 0.0}),
        (schedule("inverse_sqrt", warmup_steps=4), {4: 1.0, 16: 0.5, 64: 0.25, 100: 0.2}),
        (schedule("inverse_sqrt", warmup_steps=4, min_lr=0.3), {16: 0.5, 64: 0.3}),
        (schedule("inverse_sqrt"), {1: 1.0, 4: 0.5, 100: 0.1}),
        (schedule("wsd", warmup_steps=10), {10: 1.0, 50: 1.0, 80: 1.0, 90: 0.5, 95: 0.25, 100: 0.0}),
        (schedule("wsd", decay_steps=50, min_lr=0.2), {50: 1.0, 75: 0.6, 100: 0.2}),
        (schedule("wsd_sqrt", decay_steps=64, min_lr=0.2), {36: 1.0, 52: 0.6, 72: 0.4, 100: 0.2}),
        (schedule("wsd_cosine", decay_steps=40), {60: 1.0, 70: (1 + math.sqrt(0.5)) / 2, 80: 0.5, 100: 0.0}),
    ],
)
def test_the_rate_has_the_shape_that_is_named(shape: Schedule, points: dict[int, float]) -> None:
    assert {step: learning_rate(step, 1.0, shape, 100) for step in points} == pytest.approx(points, abs=1e-12)


@given(
    st.sampled_from(SHAPES), st.integers(0, 30), st.none() | st.integers(1, 60), st.floats(0, 2), st.integers(1, 100)
)
def test_the_rate_never_passes_the_peak_and_after_the_warm_up_never_rises_or_falls_below_the_least(
    name: str, warmup: int, decay: int | None, min_lr: float, total: int
) -> None:
    shape = schedule(name, warmup, decay, min_lr)
    rates = [learning_rate(step, 1.0, shape, total) for step in range(1, total + 1)]
    assert all(0 <= rate <= 1 + 1e-12 for rate in rates)
    after = rates[warmup:]
    assert all(later <= earlier + 1e-12 for earlier, later in pairwise(after))
    assert all(rate >= min(min_lr, 1.0) - 1e-12 for rate in after)


# Weight decay.


@pytest.mark.parametrize(
    ("name", "end", "points"),
    [
        ("constant", None, {1: 0.1, 100: 0.1}),
        ("constant", 0.5, {1: 0.1, 100: 0.1}),
        ("linear", None, {1: 0.1, 100: 0.1}),
        ("linear", 0.5, {25: 0.2, 50: 0.3, 100: 0.5}),
        ("linear", 0.0, {25: 0.075, 100: 0.0}),
        ("cosine", 0.5, {50: 0.3, 100: 0.5, 25: 0.1 + 0.4 * (1 - math.cos(math.pi / 4)) / 2}),
        ("cosine", 0.1, {1: 0.1, 100: 0.1}),
    ],
)
def test_weight_decay_goes_from_the_optimizers_value_to_the_end_over_the_run(
    name: str, end: float | None, points: dict[int, float]
) -> None:
    change = WeightDecay(name=name, end=end)  # type: ignore[arg-type]
    assert {step: weight_decay(step, 0.1, change, 100) for step in points} == pytest.approx(points, abs=1e-12)


# Batch size.


def sizes(global_batch_size: int, rampup: BatchRampup, steps: int) -> list[int]:
    consumed, found = 0, []
    for _ in range(steps):
        found.append(batch_size(consumed, trainer(global_batch_size), rampup))
        consumed += found[-1]
    return found


def test_increases_are_equal_and_at_equal_numbers_of_samples_and_the_last_one_stops_at_the_whole_batch() -> None:
    # 2, 4, 6, 8: three increases, one every 12 / 3 = 4 samples. Samples before each step: 0, 2, 4, 8, 14.
    rampup = BatchRampup(start=2, increment=2, samples=12)
    assert sizes(8, rampup, 5) == [2, 2, 4, 6, 8]
    assert sizes(8, NO_RAMPUP, 3) == [8, 8, 8]
    assert [batch_size(n, trainer(8), rampup) for n in (0, 3, 4, 7, 8, 11, 12, 10**9)] == [2, 2, 4, 4, 6, 6, 8, 8]
    rampup = BatchRampup(start=1, increment=4, samples=20)
    assert [batch_size(n, trainer(8), rampup) for n in (0, 9, 10, 19, 20)] == [1, 1, 5, 5, 8]


@given(st.integers(1, 64), st.integers(1, 64), st.integers(1, 16), st.integers(0, 500))
def test_the_batch_only_grows_and_is_whole_after_the_ramp_up(size: int, start: int, by: int, samples: int) -> None:
    rampup = BatchRampup(start=start, increment=by, samples=samples)
    found = [batch_size(consumed, trainer(size), rampup) for consumed in range(samples + 2)]
    assert found == sorted(found)
    assert found[0] == (min(start, size) if samples else size)
    assert found[samples] == size
    assert set(found) <= {size, *range(start, size, by)}
