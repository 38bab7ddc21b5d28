"""ZeRO, pipeline schedules and experts on two GPUs: the run of one process.

`benchmarks/overlap.py` measures the overlap.
"""

from functools import cache
from typing import Any

import pytest
from gpus import traced

from mplug_testing import run_workers
from mplug_testing.harness import Trace, difference, weights_off

pytestmark = pytest.mark.gpu(2)

SMALL: dict[str, Any] = {"trainer.device": "cuda", "trainer.precision": "fp32"}
ZERO: dict[str, Any] = {**SMALL, "parallel.layout": "zero2", "parallel.zero.bucket_mib": 0.02}
PIPELINE: dict[str, Any] = {**SMALL, "trainer.micro_batch_size": 1, "model.tie_embeddings": True}


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_zero_on_two_gpus_gives_the_run_of_one_process(stage: int, optimizer: str) -> None:
    settings = {**ZERO, "optimizer.name": optimizer, "parallel.zero.stage": stage}
    reference = run_workers(1, traced, {**settings, "parallel.layout": ""})[0]
    found = run_workers(2, traced, settings)
    in_fp32 = optimizer == "adamw"  # Muon orthogonalises in bf16 on a GPU, whose step is 8e-3
    assert difference(found, reference, 1e-5 if in_fp32 else 1e-2) == ""
    assert weights_off(found, reference, 1e-3 if in_fp32 else 3e-2) == ""


@pytest.mark.parametrize("stage", [1, 2])
def test_overlap_changes_no_bit(stage: int) -> None:
    settings = {**ZERO, "parallel.zero.stage": stage}
    one, other = (run_workers(2, traced, {**settings, "parallel.zero.overlap": overlap}) for overlap in (True, False))
    assert [trace.losses for trace in one] == [trace.losses for trace in other]
    assert [trace.norms for trace in one] == [trace.norms for trace in other]


@cache
def alone() -> Trace:
    return run_workers(1, traced, {**PIPELINE, "parallel.layout": ""})[0]


@pytest.mark.filterwarnings("ignore")  # torch's own, for the first context of a GPU in a thread and as it traces
@pytest.mark.parametrize("compiler", ["never", "inductor"])
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe-v"])
def test_a_pipeline_on_two_gpus_gives_the_run_of_one_process(schedule: str, compiler: str) -> None:
    settings = {**PIPELINE, "parallel.layout": "pp2", "parallel.pp.schedule": schedule, "trainer.compile": compiler}
    assert difference(run_workers(2, traced, settings), alone(), 1e-5) == ""


EXPERTS: dict[str, Any] = {
    **SMALL,
    "model.name": "mixtral",
    "model.preset": "tiny",
    "model.num_experts": 8,
    "parallel.layout": "ep2",
    "trainer.deterministic": True,
}


ROOM = pytest.mark.parametrize("room", [1.5, 0.6], ids=["room", "lost rows"])


def symmetric_and_messages(room: float, compiler: str) -> list[list[Trace]]:
    """Runs whose rows are written into the memory of another GPU, and travel as messages. Only the first need room."""
    settings = {**EXPERTS, "trainer.compile": compiler}
    symmetric = {"parallel.ep.dispatch": "symmetric", "parallel.ep.room": room}
    return [run_workers(2, traced, {**settings, **way}) for way in (symmetric, {"parallel.ep.dispatch": "all_to_all"})]


@pytest.mark.filterwarnings("ignore")  # torch's own, as it traces
@pytest.mark.parametrize("compiler", ["never", "aot_eager"])
@ROOM
def test_rows_written_into_the_memory_of_another_gpu_give_the_bits_of_messages(room: float, compiler: str) -> None:
    one, other = symmetric_and_messages(room, compiler)
    assert [trace.losses for trace in one] == [trace.losses for trace in other]
    assert [trace.norms for trace in one] == [trace.norms for trace in other]


@pytest.mark.filterwarnings("ignore")  # torch's own, as it traces
@ROOM
def test_under_inductor_such_rows_give_losses_and_norms_of_messages_to_a_millionth(room: float) -> None:
    """Not their bits: the shapes of the two differ, and the compiler generates its kernels for shapes."""
    for one, other in zip(*symmetric_and_messages(room, "inductor"), strict=True):
        assert one.losses == pytest.approx(other.losses, rel=1e-6)
        assert one.norms == pytest.approx(other.norms, rel=1e-6)
