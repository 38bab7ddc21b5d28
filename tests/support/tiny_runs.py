"""Small runs in this process, and the figures and checkpoints that they leave."""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from mplug import Record, Run, hookimpl
from mplug.config.defaults import default_settings
from mplug.config.sources import read_assignments
from mplug.registry.entry_points import Registry
from mplug.registry.resolve import resolve
from mplug.run.prepare import prepare
from mplug.training.assembly import build
from mplug.training.loop import Ending, train
from mplug.training.metrics_writer import MetricsFile
from mplug_saving.names import path_of, step_of
from mplug_saving.position import Position
from mplug_testing.harness import as_rank, tiny_config

NOISY = ["model.dropout=0.1", "model.attention_dropout=0.1"]


def prepared(directory: Path | None, fields: Iterable[str], *changes: str, **plugins: object) -> Run:
    config = resolve(Registry(), default_settings(), read_assignments([*fields, *changes]))
    named = {f"host/{name}": plugin for name, plugin in plugins.items()}
    return prepare(config, {"host/metrics": MetricsFile(), **named}, directory)


def trained(
    directory: Path, fields: Iterable[str], *changes: str, resume_from: Path | None = None, **plugins: object
) -> Ending:
    return train(prepared(directory, fields, *changes, **plugins), resume_from)


def position_of(settings: dict[str, Any], directory: Path) -> Position:
    """Be one rank: the beginning of a run on the CPU, whose checkpoints are in a folder and are saved at once."""
    quick = {"trainer.eval_every": 0, "checkpoint.asynchronous": False}
    run = as_rank(prepare(tiny_config({**quick, **settings}), directory=directory))
    run.device = "cpu"
    return Position(run, build(run))


def metrics(directory: Path) -> list[Record]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def figures(directory: Path) -> list[tuple[int, float, float, float, int]]:
    """What of each step does not depend on the clock."""
    return [tuple(line[name] for name in ("step", "loss", "grad_norm", "lr", "tokens")) for line in metrics(directory)]


def saved(directory: Path, step: int) -> dict[str, Tensor]:
    tensors = load_file(path_of(directory / "checkpoints", step) / "rank00000.safetensors")
    assert {name.split("/")[1].split("@")[0] for name in tensors} > {"weight"}, "weights and optimizer state"
    return tensors


def assert_bitwise(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


def assert_same_run(one: Path, other: Path, step: int) -> None:
    assert figures(one) == figures(other)
    assert_bitwise(saved(one, step), saved(other, step))


def checkpoints(directory: Path) -> list[int]:
    return sorted(step_of(path) for path in (directory / "checkpoints").iterdir())


class Stop:
    """Sends the process signals while a step runs."""

    def __init__(self, step: int, *numbers: int) -> None:
        self.step, self.numbers = step, numbers

    @hookimpl
    def step_started(self, run: Run) -> None:
        for number in self.numbers if run.step == self.step else ():
            os.kill(os.getpid(), number)
