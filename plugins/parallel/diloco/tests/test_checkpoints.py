"""Checkpoints hold the global weights as the weights, and everything with which each worker continues."""

from pathlib import Path
from typing import Any

import pytest
import torch
from diloco_simulation import STREAMED, simulated

from mplug.run.folder import make_directory
from mplug.run.prepare import prepare
from mplug.training.assembly import build
from mplug.training.schedule import learning_rate
from mplug_saving.folder import read_manifest
from mplug_saving.index import Index
from mplug_saving.position import Position
from mplug_saving.storage import FolderReader
from mplug_testing import run_workers
from mplug_testing.harness import as_rank, changed_batches, in_fp64, tiny_config
from mplug_testing.workers import WorkerFailed
from mplug_validation import evaluate

OUTER: dict[str, Any] = {**STREAMED, "checkpoint.asynchronous": False}
SAVED = 4
"""The exchange of the second fragment has begun, and the local weights have not received it."""


def followed(settings: dict[str, Any], folder: str, source: str | None) -> tuple[list[float], list[float], float]:
    """Be one rank: train to the end, and save after step SAVED; or continue. Returns losses, norms and validation."""
    run = as_rank(prepare(tiny_config(in_fp64(settings)), directory=Path(folder)))
    parts = build(run)
    position, losses, norms = Position(run, parts), [], []
    make_directory(run)
    if source is not None:
        position.load(position.choose(Path(source)))
    config = run.config
    while run.step < config.trainer.steps:
        run.step += 1
        parts.stepper.forward_backward(changed_batches(parts, config.trainer.global_batch_size), run.step)
        lr = learning_rate(run.step, config.optimizer.lr, config.schedule, config.trainer.steps)
        result = parts.stepper.update(lr, config.optimizer.weight_decay)
        position.samples += config.trainer.global_batch_size
        losses.append(float(result.loss))
        norms.append(float(result.grad_norm))
        if run.step == SAVED and source is None:
            position.save()
    return losses, norms, evaluate(run, parts)


def started(layout: str, ranks: int, folder: Path, source: Path | None = None, **more: Any) -> Any:
    settings = {**OUTER, **more, "parallel.layout": layout}
    found = run_workers(ranks, followed, settings, str(folder), None if source is None else str(source))
    assert found.count(found[0]) == len(found)
    return found[0]


def checkpoint_in(folder: Path) -> Path:
    (found,) = folder.glob("checkpoints/step_*")
    return found


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("saved")
    whole = started("diloco2zero2", 4, folder)
    return checkpoint_in(folder), whole


@pytest.mark.wide("layouts", quick=["diloco2"])
@pytest.mark.parametrize("layout", ["diloco2", "diloco2zero2", "diloco2tp2", "diloco2pp2", "diloco2fsdp2"])
def test_a_run_resumes_under_another_layout_with_an_exchange_under_way(
    layout: str, saved: tuple[Path, Any], tmp_path: Path
) -> None:
    checkpoint, (losses, norms, val_loss) = saved
    found = started(layout, 2 if layout == "diloco2" else 4, tmp_path, checkpoint)
    assert found[0] == pytest.approx(losses[SAVED:], rel=1e-10)
    assert found[1] == pytest.approx(norms[SAVED:], rel=1e-10)
    assert found[2] == pytest.approx(val_loss, rel=1e-10)


def whole(checkpoint: Path, index: Index, name: str) -> torch.Tensor:
    """A tensor of a checkpoint, from all its chunks."""
    shape, reader = index.shapes[name], FolderReader(checkpoint)
    found = torch.full(shape, float("nan"), dtype=torch.float64)
    for overlap in index.overlaps(name, [((0,) * len(shape), shape)]):
        place = tuple(slice(start, start + length) for start, length in zip(overlap.placed, overlap.shape, strict=True))
        found[place] = reader.whole(name, overlap.file, overlap.chunk)
    return found


def test_the_weights_of_a_checkpoint_are_the_global_ones_and_each_worker_has_its_own(saved: tuple[Path, Any]) -> None:
    checkpoint, _ = saved
    index = Index.of(read_manifest(checkpoint))
    expected = simulated(OUTER, 2, steps=SAVED)
    for name, weights in expected.global_weights.items():
        torch.testing.assert_close(whole(checkpoint, index, f"{name}/weight"), weights, rtol=0, atol=1e-9)
        local = whole(checkpoint, index, f"{name}/local_weight")
        torch.testing.assert_close(local, expected.local_weights[name], rtol=0, atol=1e-9)
        assert index.shapes[f"{name}/outer_momentum"] == tuple(weights.shape)
        assert index.shapes[f"{name}/exp_avg"] == (2, *weights.shape)


@pytest.mark.wide("layouts", quick=["dp2-exact up to rounding"])
@pytest.mark.parametrize(("layout", "words"), [("dp2", "exact up to rounding"), ("diloco4", "4 workers")])
def test_another_number_of_workers_is_refused(layout: str, words: str, saved: tuple[Path, Any], tmp_path: Path) -> None:
    checkpoint, _ = saved
    with pytest.raises(WorkerFailed) as caught:
        started(layout, 2 if layout == "dp2" else 4, tmp_path, checkpoint)
    assert "2 workers train their own weights" in str(caught.value)
    assert words in str(caught.value)
