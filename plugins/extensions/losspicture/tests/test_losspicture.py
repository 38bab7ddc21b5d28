"""The picture of a run's loss: its points, its axes, and when it is drawn."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest
from mplug_losspicture import LossPicture
from mplug_losspicture.drawing import MARK, MOST, Curve, log_ticks, smoothed, svg, ticks

from mplug.training.loop import train
from mplug_testing import ExtensionSuite
from mplug_testing.harness import tiny_run

SVG = "{http://www.w3.org/2000/svg}"


class TestLossPicture(ExtensionSuite):
    plugin = "losspicture"
    files = ("loss.svg",)
    without_effect = {"seconds": "it decides when the picture is drawn, and not what it shows"}


def curve(*losses: float | None, first: int = 1) -> Curve:
    found = Curve()
    for step, loss in enumerate(losses, start=first):
        found.add(step, loss)
    return found


def drawn(training: Curve, validation: Curve | None = None) -> ElementTree.Element:
    picture = svg(training, validation or Curve())
    assert picture is not None
    return ElementTree.fromstring(picture)


def texts(picture: ElementTree.Element) -> list[str]:
    return [str(one.text) for one in picture.iter(f"{SVG}text")]


def lines(picture: ElementTree.Element) -> list[list[tuple[float, float]]]:
    points = [one.attrib["points"].split() for one in picture.iter(f"{SVG}polyline")]
    return [[(float(x), float(y)) for x, y in (point.split(",") for point in line)] for line in points]


def test_points_have_the_pixels_of_their_steps_and_losses() -> None:
    """Axes from 64 to 696 pixels and from 308 up to 40; steps 0 to 4, losses 1 to 3."""
    picture = drawn(curve(3.0, 2.0, 2.5, 1.0), curve(2.0, first=4))
    assert lines(picture) == [[(222.0, 40.0), (380.0, 174.0), (538.0, 107.0), (696.0, 308.0)], [(696.0, 174.0)]]
    assert {"training loss", "validation loss", "step", "loss, nats per token", "1", "1.5", "3"} <= {*texts(picture)}


def test_losses_that_differ_by_more_than_ten_times_are_drawn_on_a_log_scale() -> None:
    picture = drawn(curve(10.0, 1.0, 0.1))
    assert [y for _, y in lines(picture)[0]] == [40.0, 174.0, 308.0]
    assert "loss, nats per token, log scale" in texts(picture)
    assert {"0.1", "0.2", "0.5", "1", "2", "5", "10"} <= {*texts(picture)}
    assert "loss, nats per token" in texts(drawn(curve(10.0, 1.0, -0.1)))  # a logarithm needs positive losses


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (2.0, 2.0), (1e-7, 3e6), (0.3, 11.2), (5.0, 50.0)])
def test_ticks_enclose_the_range(low: float, high: float) -> None:
    for found in (ticks(low, high), *([log_ticks(low, high)] if low else [])):
        assert found == sorted(set(found))
        assert found[0] <= low <= high <= found[-1] * (1 + 1e-9)
        assert len(found) <= 16


def test_a_long_run_is_drawn_by_the_means_of_consecutive_steps() -> None:
    steps = 5 * MOST
    found = curve(*(float(step % 2) for step in range(steps)))
    assert found.width == 8
    assert found.points() == [(8 * n + 4.5, 0.5) for n in range(steps // 8)]
    picture = drawn(found)
    assert "training loss, means of 8 steps, smoothed over 200" in texts(picture)
    assert [len(line) for line in lines(picture)] == [640, 640]  # the means behind, and the smoothed curve


def test_a_smoothed_curve_has_the_means_around_its_points_and_fewer_near_the_ends() -> None:
    points = [(float(step), loss) for step, loss in enumerate([9.0, 3.0, 0.0, 6.0, 3.0])]
    assert smoothed(points, 0) == points
    assert smoothed(points, 1) == [(0, 9.0), (1, 4.0), (2, 3.0), (3, 3.0), (4, 3.0)]
    assert smoothed(points, 2) == [(0, 9.0), (1, 4.0), (2, 4.2), (3, 3.0), (4, 3.0)]
    assert len(lines(drawn(curve(*range(1, 41))))) == 1  # few points are drawn as they are
    noisy = lines(drawn(curve(*(2.0 + step % 2 for step in range(900)))))
    heights = [{y for _, y in line[5:-5]} for line in noisy]
    assert max(heights[0]) - min(heights[0]) > 100 > 3 * (max(heights[1]) - min(heights[1]))


def test_losses_that_are_not_finite_have_no_point() -> None:
    assert curve(1.0, None, float("nan"), float("inf"), 2.0).points() == [(1, 1.0), (5, 2.0)]
    assert svg(curve(None), Curve()) is None


# The observer.


@pytest.fixture
def run(tmp_path: Path) -> Any:
    return SimpleNamespace(rank=0, directory=tmp_path, step=0)


def record(step: int, **more: float) -> dict[str, Any]:
    return {"step": step, "loss": 1.0 + step, **more}


def observed(run: Any, *steps: int) -> LossPicture:
    picture = LossPicture(LossPicture.Config())
    picture.run_started(run)
    for step in steps:
        picture.step_finished(record(step))
    return picture


def test_a_resumed_run_continues_the_picture_without_the_steps_that_it_repeats(run: Any) -> None:
    lines_of_metrics = [record(1), record(2, val_loss=2.5), record(3), record(4)]
    (run.directory / "metrics.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in lines_of_metrics))
    run.step = 2
    picture = observed(run, 3)
    assert picture.training.points() == [(1, 2.0), (2, 3.0), (3, 4.0)]
    assert picture.validation.points() == [(2, 2.5)]


def test_the_picture_is_drawn_at_the_end_at_checkpoints_and_once_a_minute(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, path = [1000.0], run.directory / "loss.svg"
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    picture = observed(run, 1, 2)
    for seconds, draw in ((9, picture.checkpoint_saved), (2, picture.checkpoint_saved)):
        assert not path.exists()
        now[0] += seconds
        draw()
    assert MARK in path.read_text()
    path.unlink()
    for seconds in (59, 2):
        assert not path.exists()
        now[0] += seconds
        picture.step_finished(record(3))
    path.unlink()
    picture.run_finished()
    first = path.read_text()
    picture.step_finished(record(4))
    picture.run_failed()
    assert path.read_text() != first


def test_only_rank_0_draws_a_run_without_steps_has_no_picture_and_another_programs_picture_stays(run: Any) -> None:
    observed(run).run_finished()
    run.rank = 1
    observed(run, 1, 2).run_finished()
    assert list(run.directory.iterdir()) == []
    run.rank = 0
    (run.directory / "loss.svg").write_text("<svg>mine</svg>")
    observed(run, 1, 2).run_finished()
    assert (run.directory / "loss.svg").read_text() == "<svg>mine</svg>"


def test_a_picture_that_cannot_be_drawn_does_not_end_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tiny_run({"extensions.losspicture": {}, "trainer.steps": 2})
    run.directory = tmp_path
    (tmp_path / "loss.svg").mkdir()
    train(run)
    assert "observer 'extensions/losspicture' failed in run_finished; the run continues" in capsys.readouterr().err
    assert run.step == 2
