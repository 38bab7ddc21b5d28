"""Runs of DeepSpeed's engine against one process of mplug, in fp32: losses, gradient norms and weights of 20 steps."""

from importlib.util import find_spec
from typing import Any

import pytest

from mplug.testing import run_workers
from mplug.testing.harness import logical, owned_values, tiny_run, with_ragged_labels

pytestmark = pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed")

STEPS = 20
CLOSE = 1e-5
BASE: dict[str, Any] = {
    "trainer.precision": "fp32",
    "trainer.steps": STEPS,
    "model.num_layers": 2,
    "schedule.name": "cosine",
    "schedule.warmup_steps": 4,
    "trainer.max_grad_norm": 1.0,
}


def trained(settings: dict[str, Any]) -> tuple[list[float], list[float], Any, Any, float]:
    """Be one rank: losses, norms, own weights, shapes, validation loss."""
    from mplug.training.assembly import build
    from mplug.training.evaluation import evaluate
    from mplug.training.schedule import learning_rate

    run = tiny_run({**BASE, **settings})
    parts = build(run)
    config, losses, norms = run.config, [], []
    for step in range(1, STEPS + 1):
        run.step = step
        batches = map(with_ragged_labels, parts.train_loader.take(config.trainer.global_batch_size))
        parts.stepper.forward_backward(batches, step)
        lr = learning_rate(step, config.optimizer.lr, config.schedule, STEPS)
        result = parts.stepper.update(lr, config.optimizer.weight_decay)
        run.hooks.call.parameters_updated(run=run)
        losses.append(float(result.loss))
        norms.append(float(result.grad_norm))
    shapes = {name: placement.shape for name, placement in parts.model.placements.items()}
    return losses, norms, owned_values(run, parts), shapes, float(evaluate(run, parts))


def require_close(found: list[Any], reference: Any) -> None:
    """Fail unless every rank has the reference's losses and norms, and all together its weights."""
    losses, norms, weights, shapes, val_loss = reference
    for own in found:
        assert own[0] == pytest.approx(losses, rel=CLOSE)
        assert own[1] == pytest.approx(norms, rel=CLOSE)
        assert own[4] == pytest.approx(val_loss, rel=CLOSE)
    for name, shape in shapes.items():
        expected = logical([weights], name, shape)
        error = (logical([own[2] for own in found], name, shape) - expected).norm() / expected.norm()
        assert float(error) < CLOSE, name


@pytest.fixture(scope="module")
def alone() -> Any:
    """The run of one process."""
    return run_workers(1, trained, {})[0]


def trained_in_turn(every: list[dict[str, Any]]) -> list[Any]:
    """Be one rank of several runs, one after the other: importing DeepSpeed takes most of a worker's time."""
    return [trained(settings) for settings in every]


STAGES = [{"parallel.deepspeed.stage": stage} for stage in (1, 2, 3)]
OFFLOADED = [
    *({**stage, "parallel.deepspeed.offload_optimizer": True} for stage in STAGES),
    {**STAGES[2], "parallel.deepspeed.offload_optimizer": True, "parallel.deepspeed.offload_param": True},
]


@pytest.mark.parametrize("cases", [STAGES, OFFLOADED], ids=["stages", "offloaded"])
def test_each_stage_gives_20_steps_of_one_process(alone: Any, cases: list[dict[str, Any]]) -> None:
    found = run_workers(2, trained_in_turn, [{"parallel.layout": "deepspeed2", **case} for case in cases])
    for of_case in zip(*found, strict=True):
        require_close(list(of_case), alone)


def test_with_tensor_parallelism_each_stage_gives_20_steps_of_one_process(alone: Any) -> None:
    cases = [{"parallel.layout": "tp2deepspeed2", **STAGES[0]}, {"parallel.layout": "deepspeed2tp2", **STAGES[2]}]
    for of_case in zip(*run_workers(4, trained_in_turn, cases), strict=True):
        require_close(list(of_case), alone)


def test_the_comparison_notices_another_batch(alone: Any) -> None:
    found = run_workers(1, trained, {"trainer.seed": 2})
    with pytest.raises(AssertionError):
        require_close(found, alone)

