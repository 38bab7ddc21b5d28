"""What only GPUs can show: DeepSpeed's streams, compiled units in every stage, states in the host's memory."""

import warnings
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from gpus import with_nccl

from mplug_testing import run_workers
from mplug_testing.harness import tiny_run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        find_spec("mplug_deepspeed") is None or find_spec("deepspeed") is None, reason="it is not installed"
    ),
]
on_two = pytest.mark.gpu(2)

STEPS = 8
BASE: dict[str, Any] = {
    "trainer.device": "cuda",
    "trainer.steps": STEPS,
    "trainer.seq_length": 64,
    "trainer.precision": "fp32",
    "schedule.warmup_steps": 2,
    "model.num_layers": 3,
    "model.hidden_size": 128,
}


def cases(ranks: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Every stage, and the stages with states (and weights) in the host's memory."""
    stages = [{"parallel.layout": f"deepspeed{ranks}", "parallel.deepspeed.stage": stage} for stage in (1, 2, 3)]
    offloaded = [{**stage, "parallel.deepspeed.offload_optimizer": True} for stage in stages[1:]]
    offloaded[1]["parallel.deepspeed.offload_param"] = True
    return stages, offloaded


COMPILED = {"trainer.precision": "bf16", "trainer.compile": "inductor"}


def trained_in_turn(every: list[dict[str, Any]]) -> list[tuple[list[float], list[float]]]:
    """Be one rank of several runs on GPUs: losses and gradient norms of each."""
    from mplug.training.assembly import build
    from mplug.training.schedule import learning_rate

    with_nccl()
    warnings.simplefilter("ignore")  # the compiler's own
    figures = []
    for settings in every:
        run = tiny_run({**BASE, **settings})
        parts, config, losses, norms = build(run), run.config, [], []
        for step in range(1, STEPS + 1):
            run.step = step
            parts.stepper.forward_backward(parts.train_loader.take(config.trainer.global_batch_size), step)
            lr = learning_rate(step, config.optimizer.lr, config.schedule, STEPS)
            result = parts.stepper.update(lr, config.optimizer.weight_decay)
            losses.append(float(result.loss))
            norms.append(float(result.grad_norm))
        run.hooks.observe("run_finished", run=run)
        print(
            settings, [round(loss, 5) for loss in losses], round(torch.cuda.max_memory_allocated() / 2**20), flush=True
        )
        figures.append((losses, norms))
    return figures


def test_stages_and_offload_on_one_gpu_give_the_losses_without_deepspeed() -> None:
    stages, offloaded = cases(1)
    alone, *others = run_workers(1, trained_in_turn, [{}, *stages, *offloaded])[0]
    assert len(others) == 5
    for losses, norms in others:
        assert losses == pytest.approx(alone[0], rel=1e-4)
        assert norms == pytest.approx(alone[1], rel=1e-3)


def test_compiled_units_in_bf16_on_one_gpu_stay_near_those_without_deepspeed() -> None:
    reference, *others = run_workers(1, trained_in_turn, [COMPILED, *({**stage, **COMPILED} for stage in cases(1)[0])])[
        0
    ]
    assert len(others) == 3
    for losses, _ in others:
        assert losses == pytest.approx(reference[0], rel=0.01)


@on_two
def test_stages_and_offload_on_two_gpus_give_the_losses_of_one() -> None:
    (alone,) = run_workers(1, trained_in_turn, [{}])[0]
    stages, offloaded = cases(2)
    for own in run_workers(2, trained_in_turn, [*stages, *offloaded]):
        for losses, norms in own:
            assert losses == pytest.approx(alone[0], rel=1e-4)
            assert norms == pytest.approx(alone[1], rel=1e-3)


@on_two
def test_compiled_units_in_bf16_stay_near_zero() -> None:
    every = [{"parallel.layout": "zero2", **COMPILED}, *({**stage, **COMPILED} for stage in cases(2)[0])]
    for (reference, _), *others in run_workers(2, trained_in_turn, every):
        for losses, _ in others:
            assert losses == pytest.approx(reference, rel=0.01)
