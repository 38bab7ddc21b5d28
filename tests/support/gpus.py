"""What tests on GPUs share."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mplug import hookimpl
from mplug.config.defaults import default_settings
from mplug.config.sources import from_mapping, merge
from mplug.registry.resolve import resolve
from mplug.run.prepare import prepare
from mplug.training.loop import train
from mplug_testing.harness import Trace, installed_plugins, train_steps

STEPS = 3
"""Steps of `trained_steps`."""
Step = tuple[float, float]
"""The loss and the norm of the gradient."""


def with_nccl() -> None:
    """Change the worker's process group to one of its GPU's."""
    rank, size = dist.get_rank(), dist.get_world_size()
    store = dist.distributed_c10d._get_default_store()
    dist.destroy_process_group()
    torch.cuda.set_device(rank)
    prefixed = dist.PrefixStore("nccl", store)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=prefixed, rank=rank, world_size=size)


def traced(settings: dict[str, Any]) -> Trace:
    """Be one rank of a run in full fp32; its trace, in the memory of the host."""
    torch.backends.cuda.matmul.allow_tf32 = False
    with_nccl()
    trace = train_steps(settings)
    for found in (trace.initial, trace.weights, *trace.gradients):
        for name, boxes in found.items():
            found[name] = [(start, values.cpu()) for start, values in boxes]
    return trace


class Watch:
    """The losses and gradient norms that observers receive."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.norms: list[float] = []

    @hookimpl
    def step_finished(self, record: dict[str, Any]) -> None:
        self.losses.append(record["loss"])
        self.norms.append(record["grad_norm"])


def trained_steps(folder: Path, changes: dict[str, Any]) -> list[Step]:
    """Train `STEPS` steps as `mplug train` does, in this process: the default run with changes, by their fields."""
    settings = default_settings()
    for name, value in {"trainer.steps": STEPS, "trainer.eval_every": 0, **changes}.items():
        settings = merge(settings, from_mapping(value, "the test", tuple(name.split("."))))
    watch = Watch()
    train(prepare(resolve(installed_plugins(), settings, {}), {"host/watch": watch}, folder))
    return [*zip(watch.losses, watch.norms, strict=True)]
