"""What a checkpoint holds of loaders, and the check of exact resumes. The suite of loaders resumes each loader."""

from pathlib import Path
from typing import Any

import pytest

from mplug import MapLoader
from mplug.training.assembly import build
from mplug_saving.folder import newest, read_manifest
from mplug_saving.position import Position
from mplug_testing import run_workers
from mplug_testing.harness import tiny_run
from mplug_testing.resume import require_exact_resume
from mplug_testing.suite import Fault


def test_a_state_that_is_a_sample_off_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    mock = {"data.name": "mock"}
    require_exact_resume(mock, "dp2", [8, 4], "dp4", count=16)
    state_dict = MapLoader.state_dict
    monkeypatch.setattr(MapLoader, "state_dict", lambda self: {n: v + 4 for n, v in state_dict(self).items()})
    with pytest.raises(Fault, match=r"after 8 samples under 'dp2', resumed under 'dp4': the samples \[8, 9,"):
        require_exact_resume(mock, "dp2", [8], "dp4", count=16)


# What a checkpoint holds of loaders: the state of rank 0, or one that the loader makes of the states of all ranks.


class Plain:
    """Wraps a loader; each rank has a state of its own."""

    fingerprint = merge_states = None

    def __init__(self, loader: Any, rank: int) -> None:
        self.loader, self.rank = loader, rank

    def state_dict(self) -> dict[str, Any]:
        return {"of": self.rank}


class Merging(Plain):
    def merge_states(self, states: list[dict[str, Any]]) -> dict[str, Any]:
        return {"of": [state["of"] for state in states]}


def saved(layout: str, wrap: type[Plain], folder: Path) -> Any:
    """Be one rank that saves, and see what is there."""
    run = tiny_run({"parallel.layout": layout, "model.num_layers": 1})
    run.directory, parts = folder, build(run)
    parts.train_loader.loader = wrap(parts.train_loader.loader, run.rank)  # type: ignore[assignment]
    position = Position(run, parts)
    position.save()
    position.saver.wait()
    return read_manifest(newest(run.checkpoints))["loader"]


@pytest.mark.parametrize(
    ("layout", "wrap", "expected"),
    [
        ("dp2", Plain, {"of": 0}),
        ("dp2", Merging, {"of": [0, 1]}),
        ("tp2", Merging, {"of": [1]}),  # both read the same part, and either's will do
    ],
)
@pytest.mark.wide("data", quick=["dp2-Merging-expected1"])
def test_a_checkpoint_holds_the_state_of_the_global_order(
    layout: str, wrap: type[Plain], expected: Any, tmp_path: Path
) -> None:
    assert run_workers(2, saved, layout, wrap, tmp_path) == [expected] * 2
