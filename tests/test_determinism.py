"""`--deterministic`: what torch is told for a run, that it is forgotten afterwards, and that two runs are one."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from scanning import SCANS
from torch._inductor import config as inductor
from torch.utils._python_dispatch import TorchDispatchMode
from warm import run_module

from mplug.config.defaults import default_settings
from mplug.config.sources import merge, read_assignments
from mplug.training.job import Job, work
from mplug.training.loop import Ending
from mplug_testing.harness import train_steps

SMALL = [
    "model.preset=null",
    "model.num_layers=2",
    "model.hidden_size=32",
    "model.num_attention_heads=2",
    "model.vocab_size=259",
    "data.name=mock",
    "trainer.steps=4",
    "trainer.seq_length=16",
    "trainer.device=cpu",
    "trainer.eval_every=0",
    "checkpoint.every=0",
]


def job(directory: Path, *changes: str) -> Job:
    return Job(default_settings(), merge(read_assignments(SMALL), read_assignments(changes)), directory, None)


def told() -> dict[str, Any]:
    """All that the process has been told about determinism."""
    return {
        "algorithms": torch.are_deterministic_algorithms_enabled(),
        "only warns": torch.is_deterministic_algorithms_warn_only_enabled(),
        "fills memory": torch.utils.deterministic.fill_uninitialized_memory,
        "cudnn": (torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark),
        "cublas": os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
        "inductor": inductor.deterministic,
    }


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What a process had been told when it began to train; it does not train."""
    found: list[dict[str, Any]] = []

    def train(*arguments: Any) -> Ending:
        found.append(told())
        return Ending()

    monkeypatch.setattr("mplug.training.loop.train", train)
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    return found


def test_a_run_is_deterministic_with_the_flag_alone_and_leaves_nothing_behind(
    heard: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    before = told()
    assert not before["algorithms"]
    work(job(tmp_path))
    assert heard.pop() == before
    work(job(tmp_path, "trainer.deterministic=true"))
    set_to = {"algorithms": True, "only warns": False, "fills memory": False, "inductor": True}
    assert heard.pop() == {**set_to, "cudnn": (True, False), "cublas": ":4096:8"}
    assert told() == before

    def fail(*_: Any) -> Ending:
        raise RuntimeError("it fails")

    monkeypatch.setattr("mplug.training.loop.train", fail)
    with pytest.raises(RuntimeError, match="it fails"):
        work(job(tmp_path, "trainer.deterministic=true"))
    assert told() == before


def test_the_workspace_that_the_user_chose_is_kept(
    heard: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    work(job(tmp_path, "trainer.deterministic=true"))
    assert heard[0]["cublas"] == ":16:8" == os.environ["CUBLAS_WORKSPACE_CONFIG"]


def trained(folder: Path, name: str, *options: str) -> tuple[list[float], dict[str, bytes]]:
    """The losses of a run in a process of its own, and the files of its last checkpoint that hold tensors."""
    changes = [word for change in SMALL for word in ("--set", change)]
    words = ["train", "--name", name, "--deterministic", *changes, *options]
    run_module("mplug", *words, cwd=folder, environment=os.environ).check_returncode()
    run = folder / "runs" / name
    losses = [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    (checkpoint,) = (run / "checkpoints").iterdir()
    return losses, {path.name: path.read_bytes() for path in checkpoint.glob("*.safetensors")}


def assert_same_bits(folder: Path, steps: int, *options: str) -> None:
    one, other = (trained(folder, name, *options) for name in ("one", "other"))
    assert len(one[0]) == steps
    assert one[1]
    assert one == other


def test_two_runs_with_the_flag_end_in_the_same_bits(tmp_path: Path) -> None:
    assert_same_bits(tmp_path, 4)


@pytest.mark.gpu
@pytest.mark.parametrize("compiler", ["never", "inductor"])
def test_two_runs_on_a_gpu_with_the_flag_end_in_the_same_bits(tmp_path: Path, compiler: str) -> None:
    """Long enough for attention's backward to be split: in several parts whose order of addition matters."""
    changes = {
        "trainer.device": "cuda",
        "trainer.precision": "bf16",
        "trainer.compile": compiler,
        "trainer.steps": 10,
        "trainer.seq_length": 1024,
        "trainer.micro_batch_size": 4,
        "trainer.global_batch_size": 8,
        "model.hidden_size": 512,
        "model.num_attention_heads": 8,
        "model.vocab_size": 4096,
    }
    options = [word for field, value in changes.items() for word in ("--set", f"{field}={value}")]
    assert_same_bits(tmp_path, 10, *options)


class NoFloatingSums(TorchDispatchMode):
    """Refuses `cumsum` of floating-point numbers: on a GPU, torch raises for it in a deterministic run."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.overloadpacket is not torch.ops.aten.cumsum or not args[0].is_floating_point(), args[0].shape
        return func(*args, **(kwargs or {}))


def test_scans_in_plain_torch_run_in_a_deterministic_run_on_a_gpu() -> None:
    with NoFloatingSums():
        assert train_steps({**SCANS, "kernels.default": None}).losses
