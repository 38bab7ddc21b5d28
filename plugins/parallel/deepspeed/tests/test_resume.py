"""A checkpoint of a DeepSpeed run is a checkpoint like any other: it resumes under every layout, and back."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from mplug.run.prepare import prepare
from mplug_saving.folder import newest
from mplug_testing import run_workers, runs
from mplug_testing.harness import tiny_config

pytestmark = pytest.mark.skipif(
    find_spec("mplug_deepspeed") is None or find_spec("deepspeed") is None, reason="it is not installed"
)

CLOSE = 1e-5
BASE: dict[str, Any] = {
    "model.num_layers": 2,
    "model.tie_embeddings": True,
    "trainer.eval_every": 0,
    "trainer.precision": "fp32",
    "optimizer.weight_decay": 0.1,
}
CHAIN = [
    ({"parallel.layout": "deepspeed2", "parallel.deepspeed.stage": 3}, 10),
    ({"parallel.layout": "zero2"}, 12),
    ({}, 14),
    ({"parallel.layout": "deepspeed2", "parallel.deepspeed.stage": 1}, 20),
]


def trained(settings: dict[str, Any], steps: int, directory: Path, resume_from: Path | None = None) -> Any:
    config = tiny_config({**BASE, **settings, "trainer.steps": steps})
    return runs.trained(config, directory, resume_from=resume_from).figures


def begin(settings: dict[str, Any], steps: int, directory: Path, resume_from: Path | None = None) -> Any:
    size = prepare(tiny_config({**BASE, **settings})).mesh.world_size
    return run_workers(size, trained, settings, steps, directory, resume_from)[0]


@pytest.mark.wide("reshard")
def test_a_run_goes_on_from_stage_3_to_other_strategies_and_back(tmp_path: Path) -> None:
    reference = begin({}, 20, tmp_path / "whole")
    figures, checkpoint = {}, None
    for number, (settings, steps) in enumerate(CHAIN):
        folder = tmp_path / str(number)
        figures |= begin(settings, steps, folder, checkpoint)
        checkpoint = newest(folder / "checkpoints")
        assert checkpoint is not None
    assert list(figures) == list(reference) == list(range(1, 21))
    for step, (loss, norm) in reference.items():
        assert figures[step] == (pytest.approx(loss, rel=CLOSE), pytest.approx(norm, rel=CLOSE)), step
