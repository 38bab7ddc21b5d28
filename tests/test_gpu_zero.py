"""ZeRO on two GPUs: the run of one process, with and without overlap. `benchmarks/overlap.py` measures the overlap."""

from typing import Any

import pytest
import torch
from gpus import with_nccl

from mplug_testing import run_workers
from mplug_testing.harness import Trace, difference, train_steps, weights_off

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there are no two CUDA GPUs here"),
]

SMALL: dict[str, Any] = {"trainer.device": "cuda", "trainer.precision": "fp32", "parallel.zero.bucket_mib": 0.02}


def trained(settings: dict[str, Any]) -> Trace:
    """Be one rank; what it sees travels back in the memory of the host."""
    torch.backends.cuda.matmul.allow_tf32 = False
    with_nccl()
    trace = train_steps(settings)
    for found in (trace.initial, trace.weights, *trace.gradients):
        for name, boxes in found.items():
            found[name] = [(start, values.cpu()) for start, values in boxes]
    return trace


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_two_gpus_give_the_run_of_one_process(stage: int, optimizer: str) -> None:
    settings = {**SMALL, "optimizer.name": optimizer, "parallel.zero.stage": stage}
    reference = run_workers(1, trained, {**settings, "parallel.layout": ""})[0]
    found = run_workers(2, trained, {**settings, "parallel.layout": "zero2"})
    in_fp32 = optimizer == "adamw"  # Muon orthogonalises in bf16 on a GPU, whose step is 8e-3
    assert difference(found, reference, 1e-5 if in_fp32 else 1e-2) == ""
    assert weights_off(found, reference, 1e-3 if in_fp32 else 3e-2) == ""


@pytest.mark.parametrize("stage", [1, 2])
def test_overlap_changes_no_bit(stage: int) -> None:
    one, other = (
        run_workers(
            2,
            trained,
            {**SMALL, "parallel.layout": "zero2", "parallel.zero.stage": stage, "parallel.zero.overlap": overlap},
        )
        for overlap in (True, False)
    )
    assert [trace.losses for trace in one] == [trace.losses for trace in other]
    assert [trace.norms for trace in one] == [trace.norms for trace in other]
