"""A run with pictures that is killed in the middle of epochs and goes on under other layouts, by the command line.

An extension records the samples that every rank computes in a step. It halts in the middle of one step, where every
process of the command is killed by SIGKILL.
"""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from distributions import installed
from picture_talks import TINY

pytest.importorskip("mplug_qwen_vl")
pytest.importorskip("PIL")
WITNESS = '''
"""An extension that records the samples of steps, and halts the last rank in the middle of one."""

import json
import os
import re
import time
from pathlib import Path

from mplug import hookimpl
from pydantic import BaseModel, ConfigDict, Field


class Witness:
    class Config(BaseModel):
        model_config = ConfigDict(extra="forbid", frozen=True)
        halt: int = Field(0, description="the step in which it halts")

    def __init__(self, config):
        self.config = config

    @hookimpl
    def wrap_model(self, run, model):
        def seen(module, given, named):
            tokens = next(one for one in [*given, *named.values()] if one.ndim == 2)
            rows = (bytes(token for token in row if token < 256) for row in tokens.tolist())
            numbers = [int(re.match(rb"user\\n(\\d+):", row)[1]) for row in rows]
            with Path(f"seen.{run.rank}.jsonl").open("a") as file:
                file.write(json.dumps({"step": run.step, "numbers": numbers}) + "\\n")
            is_first = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
            if run.step == self.config.halt and is_first and run.rank == run.mesh.world_size - 1:
                Path("halted.partial").write_text(str(os.getpid()))
                Path("halted.partial").rename("halted.last")
                time.sleep(600)

        model.module.get_submodule("embedding.token").register_forward_pre_hook(seen, with_kwargs=True)
'''
SETTINGS = {
    "data.streams": 2,
    "data.shuffle_buffer_size": None,
    "trainer.precision": "fp64",
    "trainer.global_batch_size": 8,
    "trainer.micro_batch_size": 2,
    "trainer.eval_every": 0,
    "trainer.steps": 10,
    "trainer.device": "cpu",
    "schedule.warmup_steps": 0,
    "checkpoint.every": 2,
    "checkpoint.asynchronous": False,
}
"""An epoch has 40 samples, so 5 steps."""


def nested(settings: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in settings.items():
        section, _, field = name.partition(".")
        found.setdefault(section, {})[field] = value
    return found


@pytest.fixture
def folder(tmp_path: Path, conversations: Path) -> Path:
    """A working directory with the config of the run, and the extension in its `site`."""
    config = nested({**TINY, **SETTINGS, "data.path": str(conversations)})
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    installed(tmp_path / "site", "acme-witness", "[mplug.extensions]\nwitness = acme_witness:Witness\n", WITNESS)
    return tmp_path


def train(folder: Path, *words: str, halt: int | None = None, goes_on: bool = False) -> None:
    """Train, and kill all processes in the step `halt`; if the run `goes_on`, only the rank that halts."""
    for path in folder.glob("halted.*"):
        path.unlink()
    halts = ("--set", f"extensions.witness.halt={halt or 0}")
    command = [sys.executable, "-m", "mplug", "train", *words, *halts]
    environment = {**os.environ, "PYTHONPATH": str(folder / "site"), "OMP_NUM_THREADS": "1"}
    with (folder / "printed").open("w") as printed:
        started = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=printed, stderr=printed, start_new_session=True
        )
    deadline = time.monotonic() + 300
    while started.poll() is None and not (folder / "halted.last").exists():
        assert time.monotonic() < deadline, (folder / "printed").read_text()
        time.sleep(0.02)
    if halt is None:
        assert started.returncode == 0, (folder / "printed").read_text()
        return
    assert started.poll() is None, (folder / "printed").read_text()
    if goes_on:
        os.kill(int((folder / "halted.last").read_text()), signal.SIGKILL)
        assert started.wait(120) == 0, (folder / "printed").read_text()
        return
    own = [pid for pid in map(int, filter(str.isdecimal, os.listdir("/proc"))) if session_of(pid) == started.pid]
    for pid in own:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert started.wait(60) == -signal.SIGKILL


def session_of(pid: int) -> int | None:
    with suppress(ProcessLookupError):
        return os.getsid(pid)
    return None


def losses(folder: Path, name: str) -> dict[int, float]:
    lines = map(json.loads, (folder / "runs" / name / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["loss"] for line in lines}


def seen(folder: Path) -> dict[int, list[int]]:
    """The samples of each step on all ranks, since the last call."""
    found: dict[int, list[int]] = {}
    for path in folder.glob("seen.*.jsonl"):
        for line in map(json.loads, path.read_text().splitlines()):
            found.setdefault(line["step"], []).extend(line["numbers"])
        path.unlink()
    return found


@pytest.mark.wide("kills")
def test_a_run_killed_in_the_middle_of_epochs_sees_every_sample_once_from_one_rank_to_two_and_back(
    folder: Path, conversations: Path
) -> None:
    train(folder, "--config", "run.yaml", "--name", "whole")
    whole = seen(folder)
    train(folder, "--config", "run.yaml", "--name", "killed", halt=4)
    lives = [seen(folder)]
    train(folder, "--name", "killed", "--resume", "--parallel", "dp2", halt=8)
    lives.append(seen(folder))
    train(folder, "--name", "killed", "--resume", "--parallel", "")
    lives.append(seen(folder))
    assert [min(life) for life in lives] == [1, 3, 7]  # each life begins with the newest checkpoint
    assert len(lives[0][4]) < 8  # it was killed within a step
    counted = {step: sorted(numbers) for life in lives for step, numbers in life.items()}
    assert counted == {step: sorted(numbers) for step, numbers in whole.items()}
    for epoch in (range(1, 6), range(6, 11)):
        assert sorted(number for step in epoch for number in counted[step]) == list(range(40))
    expected = losses(folder, "whole")
    assert sorted(expected) == list(range(1, 11))
    assert losses(folder, "killed") == pytest.approx(expected, rel=1e-10)


@pytest.mark.wide("kills")
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("spares", [0, 1])
def test_a_run_whose_samples_worker_processes_read_goes_on_after_the_death_of_a_rank(
    folder: Path, spares: int, num_workers: int
) -> None:
    """The worker processes of the dead rank hold its connections, for which the other rank waits."""
    reading = ("--set", f"data.num_workers={num_workers}")
    train(folder, "--config", "run.yaml", "--name", "whole", *reading)
    heal = ("--set", f"extensions.heal.spares={spares}", "--set", "extensions.heal.every=1")
    train(
        folder, "--config", "run.yaml", "--name", "healed", "--parallel", "dp2", *reading, *heal, halt=5, goes_on=True
    )
    printed = (folder / "printed").read_text()
    assert f"in step 5, died of SIGKILL; the run goes on in {1 + spares} process" in printed
    assert "the run continues after step 4, from the copies in its processes" in printed
    assert losses(folder, "healed") == pytest.approx(losses(folder, "whole"), rel=1e-10)
