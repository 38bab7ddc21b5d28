"""Plotter: mplug's suite for extensions, and what is plotter's own: the picture, and a curve that goes on."""

import json
import math
import xml.etree.ElementTree as ET
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from mplug_testing import ExtensionSuite
from nova_plotter import Plotter
from nova_plotter.curve import HEIGHT, WIDTH, Scale, picture, thinned


class TestPlotter(ExtensionSuite):
    plugin = "plotter"
    settings = {"extensions.plotter.every": 2}
    files = ("loss.svg",)


# The picture.


def elements(svg: str, name: str) -> list[ET.Element]:
    return list(ET.fromstring(svg).iter(f"{{http://www.w3.org/2000/svg}}{name}"))


def line(svg: str) -> list[tuple[float, float]]:
    (polyline,) = elements(svg, "polyline")
    return [(float(x), float(y)) for x, _, y in (pair.partition(",") for pair in polyline.attrib["points"].split())]


def test_a_falling_loss_is_a_line_from_the_upper_left_to_the_lower_right() -> None:
    drawn = line(picture([(1, 5.0), (2, 3.0), (3, 2.5)], []))
    assert [x for x, _ in drawn] == sorted(x for x, _ in drawn)
    assert [y for _, y in drawn] == sorted(y for _, y in drawn)
    (first, second, third) = drawn
    assert second[1] - first[1] == pytest.approx(4 * (third[1] - second[1]), abs=0.5)


def test_everything_lies_within_the_picture() -> None:
    svg = picture([(n, 1e-3 * n) for n in range(1, 3000)], [(1000, 4.0), (2999, 0.0)])
    places = [(float(dot.attrib["cx"]), float(dot.attrib["cy"])) for dot in elements(svg, "circle")] + line(svg)
    assert all(0 < x < WIDTH and 0 < y < HEIGHT for x, y in places)


def test_one_point_is_a_picture() -> None:
    svg = picture([(7, 2.25)], [])
    assert len(line(svg)) == 1
    assert elements(svg, "title")[0].text == "loss 2.2500 at step 7"


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (1, 950), (5.4999, 5.5001), (1.2e-7, 9.9e-7), (3, 4)])
def test_ticks_are_a_few_round_values_within_the_scale(low: float, high: float) -> None:
    ticks = Scale(low, high, 0, 1).ticks()
    assert 3 <= len(ticks) <= 10
    assert all(low <= tick <= high * (1 + 1e-12) for tick in ticks)


def test_many_points_are_thinned_to_means_of_equal_stretches() -> None:
    assert thinned([(n, float(n % 2)) for n in range(1000)], 100) == [(10 * n + 4.5, 0.5) for n in range(100)]
    assert len(thinned([(n, 0.0) for n in range(1001)], 100)) == 100


# The curve of a run.


def plotted(directory: Path, steps: range, start: int = 0, rank: int = 0, ends: bool = True) -> None:
    """A run in which the loss is the step's number, and is written to its metrics."""
    run: Any = SimpleNamespace(directory=directory, rank=rank, step=start)
    plotter = Plotter(Plotter.Config(every=5))
    plotter.run_started(run)
    with (directory / "metrics.jsonl").open("a") as metrics:
        for step in steps:
            record = {"step": step, "loss": float(step)}
            metrics.write(json.dumps(record) + "\n")
            plotter.step_finished(record)
    if ends:
        plotter.run_finished()


def test_a_curve_goes_on_where_its_run_resumes_without_the_steps_that_are_repeated(tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    plotted(tmp_path / "whole", range(1, 13))
    plotted(tmp_path, range(1, 9))
    plotted(tmp_path, range(5, 13), start=4)
    assert (tmp_path / "loss.svg").read_text() == (tmp_path / "whole" / "loss.svg").read_text()


def test_the_unfinished_last_line_of_a_killed_run_is_passed_over(tmp_path: Path) -> None:
    plotted(tmp_path, range(1, 4), ends=False)
    with (tmp_path / "metrics.jsonl").open("a") as metrics:
        metrics.write('{"step": 4, "lo')
    plotted(tmp_path, range(4, 6), start=3)
    assert len(line((tmp_path / "loss.svg").read_text())) == 5


def test_it_draws_every_so_many_steps(tmp_path: Path) -> None:
    plotted(tmp_path, range(1, 5), ends=False)
    assert not (tmp_path / "loss.svg").exists()
    plotted(tmp_path, range(5, 9), start=4, ends=False)
    assert len(line((tmp_path / "loss.svg").read_text())) == 5


def test_a_loss_that_is_not_finite_leaves_a_gap(tmp_path: Path) -> None:
    plotter = Plotter(Plotter.Config())
    plotter.run_started(SimpleNamespace(directory=tmp_path, rank=0, step=0))  # type: ignore[arg-type]
    for step, loss in enumerate((3.0, math.nan, math.inf, 2.0), start=1):
        plotter.step_finished({"step": step, "loss": loss})
    plotter.run_finished()
    assert len(line((tmp_path / "loss.svg").read_text())) == 2


def test_a_run_that_fails_before_its_first_step_has_no_picture(tmp_path: Path) -> None:
    Plotter(Plotter.Config()).run_failed()
    assert list(tmp_path.iterdir()) == []


def test_only_rank_0_draws(tmp_path: Path) -> None:
    plotted(tmp_path, range(1, 13), rank=1)
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]
