"""Losses of runs on data sets of Hugging Face's library: under layouts and after a resume, those of one process."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("datasets")

from layout_runs import difference_of

from mplug import hookimpl
from mplug.run.prepare import prepare
from mplug.training.loop import train
from mplug_saving.folder import newest
from mplug_testing import run_workers
from mplug_testing.harness import as_rank, in_fp64, tiny_config

HERE = Path(__file__).parent
DATA: dict[str, Any] = {"data.name": "datasets", "data.validation_percent": 20}
CHATS = {
    **DATA, "data.path": str(HERE / "chats.jsonl"), "data.form": "chat", "data.max_documents": 5,
    "trainer.seq_length": 128, "kernels.default": None,
}  # fmt: skip
TEXTS = {**DATA, "data.path": str(HERE / "texts.jsonl"), "trainer.seq_length": 32}
STREAMED = {"data.streaming": True, "data.block": 10}
KINDS = {"chats": CHATS, "streamed chats": CHATS | STREAMED, "texts": TEXTS, "streamed texts": TEXTS | STREAMED}
WIDE = pytest.mark.wide("data")


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@WIDE
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", ["dp2", "cp2", "tp2", "pp2", "zero2"])
def test_losses_and_gradients_under_a_layout_are_those_of_one_process(layout: str, kind: str) -> None:
    assert difference_of(layout, KINDS[kind]) == ""


class Losses:
    """Keeps the loss of every step of a run."""

    def __init__(self) -> None:
        self.of: dict[int, float] = {}

    @hookimpl
    def step_finished(self, run: Any, record: Any) -> None:
        self.of[run.step] = record["loss"]


def losses(settings: dict[str, Any], directory: Path, steps: int) -> dict[int, float]:
    kept = Losses()
    plan = {**settings, "trainer.steps": steps, "schedule.decay_steps": 6, "checkpoint.every": 0}
    run = as_rank(prepare(tiny_config(in_fp64(plan)), {"losses": kept}))
    run.directory = directory
    saved = directory / "checkpoints"
    train(run, newest(saved) if saved.exists() else None, allowed=("trainer.steps",))
    return kept.of


@WIDE
@pytest.mark.parametrize("kind", KINDS)
def test_losses_after_a_resume_on_another_number_of_ranks_are_those_of_one_process(kind: str, tmp_path: Path) -> None:
    settings = KINDS[kind]
    whole = run_workers(1, losses, settings, tmp_path / "whole", 6)[0]
    parts = {
        step: loss
        for layout, size, steps in (("dp2", 2, 2), ("dp4", 4, 4), ("", 1, 6))
        for step, loss in run_workers(size, losses, {**settings, "parallel.layout": layout}, tmp_path / "run", steps)[
            0
        ].items()
    }
    assert parts.keys() == whole.keys() == set(range(1, 7))
    for step, loss in whole.items():
        assert parts[step] == pytest.approx(loss, rel=1e-10, abs=1e-10), step
