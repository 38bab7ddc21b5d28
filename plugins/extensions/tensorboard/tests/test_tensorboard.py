"""TensorBoard: what its own reader finds in the files of a run."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("tensorboard")

from mplug_tensorboard import TensorBoard
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from mplug import UsageError, scalars
from mplug_testing import ExtensionSuite


class TestTensorBoard(ExtensionSuite):
    plugin = "tensorboard"
    files = ("tensorboard/events.out.tfevents.*",)
    examples = {"folder": ["all"]}
    without_effect = {"flush_seconds": "it decides when the file is written, and not what it holds"}

    @classmethod
    def contents(cls, path: Path) -> list[str]:
        """The names of the scalars, each with its steps."""
        return [f"{tag} {[step for step, _ in events]}" for tag, events in read(path).items()]


def write(directory: Path, steps: range, after: int = 0, rank: int = 0, **config: Any) -> None:
    """The steps of a run that begins after a step, with a validation loss in every third."""
    plugin = TensorBoard(TensorBoard.Config(**config))
    plugin.run_started(SimpleNamespace(rank=rank, directory=directory, step=after))  # type: ignore[arg-type]
    for step in steps:
        record: dict[str, Any] = {"step": step, "loss": 100.0 * after + step, "tokens": 8 * step, "skipped": False}
        record |= {"val_loss": step / 2} if step % 3 == 0 else {}
        record |= {"mfu": None, "statistics": {"blocks.0.router/load": [0.25, 0.75], "dropped": 2}}
        plugin.step_finished(record)
    plugin.run_finished()


def read(folder: Path) -> dict[str, list[tuple[int, float]]]:
    found = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    found.Reload()
    return {tag: [(event.step, event.value) for event in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


def test_every_number_of_a_record_is_a_scalar_at_its_step(tmp_path: Path) -> None:
    write(tmp_path, range(1, 5))
    assert read(tmp_path / "tensorboard") == {
        "loss": [(1, 1), (2, 2), (3, 3), (4, 4)],
        "tokens": [(1, 8), (2, 16), (3, 24), (4, 32)],
        "skipped": [(1, 0), (2, 0), (3, 0), (4, 0)],
        "val_loss": [(3, 1.5)],
        "statistics/blocks.0.router/load/0": [(step, 0.25) for step in range(1, 5)],
        "statistics/blocks.0.router/load/1": [(step, 0.75) for step in range(1, 5)],
        "statistics/dropped": [(step, 2) for step in range(1, 5)],
    }


def test_a_resumed_run_replaces_the_steps_that_it_repeats(tmp_path: Path) -> None:
    write(tmp_path, range(1, 7))
    (first,) = (tmp_path / "tensorboard").iterdir()
    first.rename(first.with_name("events.out.tfevents.0000000001.first"))  # names count seconds: this test has none
    write(tmp_path, range(5, 9), after=4)
    found = read(tmp_path / "tensorboard")
    assert found["loss"] == [(1, 1), (2, 2), (3, 3), (4, 4), (5, 405), (6, 406), (7, 407), (8, 408)]
    assert found["val_loss"] == [(3, 1.5), (6, 3)]


def test_every_nth_step_and_every_evaluated_step_is_written_by_rank_0(tmp_path: Path) -> None:
    write(tmp_path, range(1, 9), every=4, rank=1)
    assert list(tmp_path.iterdir()) == []
    write(tmp_path, range(1, 9), every=4)
    assert [step for step, _ in read(tmp_path / "tensorboard")["loss"]] == [3, 4, 6, 8]


def test_runs_have_folders_of_their_own_in_a_common_folder(tmp_path: Path) -> None:
    write(tmp_path / "runs" / "first", range(1, 3), folder=str(tmp_path / "all"))
    assert list(read(tmp_path / "all" / "first")["loss"]) == [(1, 1), (2, 2)]
    assert not (tmp_path / "runs").exists()


def test_values_that_are_not_finite_are_written_as_they_are() -> None:
    found = dict(scalars({"loss": math.nan, "grad_norm": math.inf, "mfu": None}))
    assert math.isnan(found.pop("loss"))
    assert found == {"grad_norm": math.inf}


def test_a_run_without_the_library_is_refused_before_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mplug_tensorboard.find_spec", lambda _: None)
    with pytest.raises(UsageError, match="needs the package 'tensorboard'; pip install tensorboard"):
        TensorBoard(TensorBoard.Config()).configure()
