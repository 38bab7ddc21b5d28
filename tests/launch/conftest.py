"""What the tests of runs of several processes share: one run's options, its folder, and undisturbed runs."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from launched import BEGUN, SHAPE, TEXT, Whole, train


@pytest.fixture(autouse=True)
def no_command_outlives_its_test() -> Iterator[None]:
    yield
    while BEGUN:
        BEGUN.pop().kill_what_is_left()


@pytest.fixture(scope="module")
def options(tiny: list[str]) -> list[str]:
    """A run that every layout of up to four ranks can do; in fp64, so that a wrong sum is told from rounding."""
    fields = {**SHAPE, "trainer.precision": "fp64"}
    return [*tiny, *(word for name, value in fields.items() for word in ("--set", f"{name}={value}"))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("launch")
    (path / "text.txt").write_text(TEXT)
    return path


@pytest.fixture(scope="module")
def whole(folder: Path, options: list[str]) -> Whole:
    """The directory of an undisturbed run of a layout ('' is one process): each is done once, by `mplug train`."""
    done: dict[str, Path] = {}

    def run(layout: str) -> Path:
        if layout not in done:
            name = f"whole-{layout or 'one'}"
            train(folder, name, "--parallel", layout, *options).succeeded()
            done[layout] = folder / "runs" / name
        return done[layout]

    return run
