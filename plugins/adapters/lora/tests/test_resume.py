"""Adapters that are saved under one layout resume under another."""

from pathlib import Path
from typing import Any

import pytest

from mplug import UsageError
from mplug.checkpoint.folder import newest, read_manifest
from mplug.run.prepare import prepare
from mplug.training.changes import changes_on_resume
from mplug_testing import run_workers
from mplug_testing.harness import EXACT, tiny_config
from mplug_testing.runs import trained

STEPS = 3
SETTINGS: dict[str, Any] = {
    "trainer.eval_every": 0,
    "trainer.precision": "fp64",
    "checkpoint.asynchronous": False,
    "model.num_layers": 2,
    "adapters.lora.rank": 3,
    "adapters.lora.dora": True,
}


def rank_of_a_run(layout: str, steps: int, directory: Path, resume_from: Path | None) -> list[float]:
    """Be one rank of a run that is saved at its end."""
    config = tiny_config({**SETTINGS, "parallel.layout": layout, "trainer.steps": steps})
    return trained(config, directory, resume_from=resume_from).losses


def losses_of(layout: str, steps: int, directory: Path, resume_from: Path | None = None) -> list[float]:
    found: list[float] = run_workers(2 if layout else 1, rank_of_a_run, layout, steps, directory, resume_from)[0]
    return found


def test_adapters_resume_under_another_layout(tmp_path: Path) -> None:
    reference = losses_of("", STEPS, tmp_path / "reference")
    before = losses_of("tp2", 1, tmp_path)
    after = losses_of("fsdp2", STEPS, tmp_path, newest(tmp_path / "checkpoints"))
    assert [*before, *after] == pytest.approx(reference, rel=EXACT)


@pytest.mark.parametrize(("before", "after"), [(None, 3), (3, None), (3, 4)], ids=["added", "dropped", "changed"])
def test_a_resumed_run_keeps_its_adapters(before: int | None, after: int | None, tmp_path: Path) -> None:
    plain = {"trainer.eval_every": 0, "trainer.steps": 1, "model.num_layers": 2, "checkpoint.asynchronous": False}
    first, second = ({**plain, **({"adapters.lora.rank": one} if one else {})} for one in (before, after))
    trained(tiny_config(first), tmp_path)
    path = newest(tmp_path / "checkpoints")
    with pytest.raises(UsageError, match=r"adapters\.lora\.rank" if before and after else r"adapters\.lora"):
        changes_on_resume(path, read_manifest(path), prepare(tiny_config(second)), ())
