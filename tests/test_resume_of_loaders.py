"""Every loader goes on exactly where it was killed, whatever the layout was and is; what a checkpoint holds of it."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mplug_indexed.files import Writer

from mplug import MapLoader
from mplug.checkpoint.folder import newest, read_manifest
from mplug.training.assembly import build
from mplug.training.position import Position
from mplug_testing import run_workers
from mplug_testing.harness import tiny_run
from mplug_testing.resume import require_exact_resume
from mplug_testing.suite import Fault

LAYOUTS = st.sampled_from(["", "dp2", "dp4", "tp2", "dp2tp2", "pp2dp2"])
PORTIONS = st.lists(st.integers(1, 4).map(lambda number: 4 * number), max_size=4)


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Small data for each loader: loader -> settings."""
    folder = tmp_path_factory.mktemp("corpora")
    drawn = np.random.default_rng(0)
    for name in ("one", "two"):
        lengths = drawn.integers(0, 60, 50)
        with Writer(folder / name, np.uint16) as writer:
            writer.add_documents(drawn.integers(0, 250, lengths.sum()).astype(np.uint16), lengths.tolist())
    chats = [
        {"messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": "so " * (n % 9 + 1)}]}
        for n in range(60)
    ]
    (folder / "chats.jsonl").write_text("".join(f"{json.dumps(chat)}\n" for chat in chats))
    (folder / "text.txt").write_text("".join(f"{n} times {n} is {n * n}.\n" for n in range(300)))
    indexed = {"data.name": "indexed", "data.split": "1", "trainer.eval_every": 0}
    blend = {str(folder / "one"): 1.0, str(folder / "two"): 2.0}
    packed = {"data.max_documents": 4, "trainer.seq_length": 64, "kernels.default": None}
    return {
        "mock": {"data.name": "mock"},
        "text": {"data.name": "text", "data.path": str(folder / "text.txt")},
        "indexed": {**indexed, "data.path": str(folder / "one")},
        "blend": {**indexed, "data.path": blend, "data.samples": 90},
        "packed": {"data.name": "packed", "data.path": str(folder / "chats.jsonl"), **packed},
    }


@given(st.sampled_from(["mock", "text", "indexed", "blend", "packed"]), LAYOUTS, PORTIONS, LAYOUTS)
@settings(max_examples=12)
def test_a_loader_goes_on_exactly_where_it_was_killed(
    corpora: dict[str, dict[str, Any]], loader: str, before: str, portions: list[int], after: str
) -> None:
    """Over the borders of epochs, too."""
    require_exact_resume(corpora[loader], before, portions, after, count=120)


def test_a_state_that_is_a_sample_off_is_found(corpora: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    state_dict = MapLoader.state_dict
    monkeypatch.setattr(MapLoader, "state_dict", lambda self: {n: v + 4 for n, v in state_dict(self).items()})
    with pytest.raises(Fault, match=r"after 8 samples under 'dp2', resumed under 'dp4': the samples \[8, 9,"):
        require_exact_resume(corpora["text"], "dp2", [8], "dp4", count=16)


# What a checkpoint holds of loaders: the state of rank 0, or one that the loader makes of the states of all ranks.


class Plain:
    """Wraps a loader; each rank has a state of its own."""

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
def test_a_checkpoint_holds_the_state_of_the_global_order(
    layout: str, wrap: type[Plain], expected: Any, tmp_path: Path
) -> None:
    assert run_workers(2, saved, layout, wrap, tmp_path) == [expected] * 2
