"""A DeepSpeed run that is killed many times ends like one that nothing disturbed."""

import os
import random
import signal
import threading
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from mplug.checkpoint.folder import complete, read_valid
from mplug.checkpoint.names import step_of
from mplug_testing import WorkerFailed, run_workers

pytestmark = [
    pytest.mark.skipif(
        find_spec("mplug_deepspeed") is None or find_spec("deepspeed") is None, reason="it is not installed"
    ),
    pytest.mark.wide("kills"),
]

KILLS, STEPS, CLOSE = 10, 24, 1e-5
SETTINGS: dict[str, Any] = {
    "parallel.layout": "deepspeed2",
    "model.num_layers": 2,
    "trainer.steps": STEPS,
    "trainer.eval_every": 0,
    "trainer.precision": "fp32",
    "checkpoint.every": 1,
    "checkpoint.keep": 3,
}


def live(stage: int, directory: Path, resume_from: Path | None, seconds: float | None) -> dict[int, float]:
    """Be a rank of a run; all ranks die `seconds` after the first step begins. The losses by step."""
    from mplug import hookimpl
    from mplug.run.prepare import prepare
    from mplug.training.loop import train
    from mplug_testing.harness import as_rank, tiny_config

    losses: dict[int, float] = {}
    pids: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(pids, os.getpid())

    def die() -> None:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)

    class Witness:
        @hookimpl
        def run_started(self, run: Any) -> None:
            if run.rank == 0:
                (directory / "begun").write_text(str(run.step))
                if seconds is not None:
                    threading.Timer(seconds, die).start()

        @hookimpl
        def step_finished(self, record: dict[str, Any]) -> None:
            losses[record["step"]] = record["loss"]

    config = tiny_config({**SETTINGS, "parallel.deepspeed.stage": stage})
    train(as_rank(prepare(config, {"host/witness": Witness()}, directory)), resume_from)
    return losses


def valid_in(folder: Path) -> list[Path]:
    """The complete checkpoints; every one of them is what was saved."""
    found = complete(folder)
    for path in found:
        read_valid(path)
    return found


def test_after_ten_kills_at_random_moments_nothing_is_lost(tmp_path: Path) -> None:
    draw, kills, number = random.Random(23), 0, 0
    whole = run_workers(2, live, 3, tmp_path / "whole", None, None)[0]
    directory, newest = tmp_path / "run0", None
    while kills < KILLS:
        try:
            losses = run_workers(2, live, draw.choice((1, 2, 3)), directory, newest, draw.uniform(0.0, 1.5))[0]
        except WorkerFailed as failure:
            if "SIGKILL" not in str(failure):
                raise
            kills, losses = kills + 1, None
        assert int((directory / "begun").read_text()) == (step_of(newest) if newest else 0)
        found = valid_in(directory / "checkpoints")
        assert not newest or (found and step_of(found[-1]) >= step_of(newest))
        newest = found[-1] if found else None
        if losses is not None or (newest and step_of(newest) == STEPS):
            number += 1
            directory, newest = tmp_path / f"run{number}", None
    begins = step_of(newest) if newest else 0
    losses = run_workers(2, live, 3, directory, newest, None)[0]
    assert losses == pytest.approx({step: loss for step, loss in whole.items() if step > begins}, rel=CLOSE)
