"""Pipeline schedules on two GPUs: the run of one process, eager and compiled by inductor."""

from functools import cache
from typing import Any

import pytest
import torch
from gpus import with_nccl

from mplug_testing import run_workers
from mplug_testing.harness import Trace, difference, train_steps

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there are no two CUDA GPUs here"),
]

SMALL: dict[str, Any] = {
    "trainer.device": "cuda",
    "trainer.precision": "fp32",
    "trainer.micro_batch_size": 1,
    "model.tie_embeddings": True,
}


def trained(settings: dict[str, Any]) -> Trace:
    """Be one rank; the trace travels back in the memory of the host."""
    torch.backends.cuda.matmul.allow_tf32 = False
    with_nccl()
    trace = train_steps(settings)
    for found in (trace.initial, trace.weights, *trace.gradients):
        for name, boxes in found.items():
            found[name] = [(start, values.cpu()) for start, values in boxes]
    return trace


@cache
def alone() -> Trace:
    return run_workers(1, trained, {**SMALL, "parallel.layout": ""})[0]


@pytest.mark.parametrize("compiler", ["never", "inductor"])
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe-v"])
def test_two_gpus_give_the_run_of_one_process(schedule: str, compiler: str) -> None:
    settings = {**SMALL, "parallel.layout": "pp2", "parallel.pp.schedule": schedule, "trainer.compile": compiler}
    assert difference(run_workers(2, trained, settings), alone(), 1e-5) == ""
