"""Schedule-free AdamW over pieces: mplug's suite against the paper's algorithm in fp64."""

import pytest
import torch
from mplug_schedulefree import ScheduleFree
from torch import Tensor

from mplug import AVERAGE, Parameter, UsageError
from mplug_testing import DenseStep, OptimizerSuite
from mplug_testing.harness import tiny_run


def published(weight: Tensor, steps: list[DenseStep], config: ScheduleFree.Config) -> tuple[Tensor, Tensor]:
    """(y, x) after the steps, by the in-place form of the paper's own code, which keeps y and z alone."""
    y, z, squares = weight.clone(), weight.clone(), torch.zeros_like(weight)
    largest = total = 0.0
    for number, (gradient, lr, decay) in enumerate(steps, 1):
        largest = max(largest, lr)
        own = number**config.power * largest**config.lr_power
        total += own
        share = own / total if total else 0.0
        squares = config.beta2 * squares + (1 - config.beta2) * gradient**2
        update = gradient / ((squares / (1 - config.beta2**number)).sqrt() + config.eps) + decay * y
        y = (1 - share) * y + share * z + lr * (config.beta1 * (1 - share) - 1) * update
        z = z - lr * update
    return y, (y - (1 - config.beta1) * z) / config.beta1


class TestScheduleFree(OptimizerSuite):
    plugin = "schedulefree"
    layouts = ("tp2", "zero2")

    def reference(
        self, weight: Tensor, steps: list[DenseStep], parameter: Parameter, config: ScheduleFree.Config
    ) -> Tensor:
        return published(weight, steps, config)[0]


@pytest.mark.wide("layouts")
class TestUnderEveryStrategy(TestScheduleFree):
    layouts = None


class TestWithOtherPowers(TestScheduleFree):
    settings = {"optimizer.power": 1.0, "optimizer.lr_power": 1.0, "optimizer.beta1": 0.6, "optimizer.beta2": 0.5}
    layouts = ()
    checks_fields = False


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA GPU here")
class TestOnAGPU(TestScheduleFree):
    settings = {"trainer.device": "cuda"}
    layouts = ()


def test_the_average_is_that_of_the_paper() -> None:
    from mplug.training.assembly import build

    run = tiny_run({"optimizer.name": "schedulefree", "trainer.precision": "fp64", "trainer.max_grad_norm": 0.0})
    parts = build(run)
    before = {piece.name: piece.master.clone() for piece in parts.pieces}
    steps: dict[str, list[DenseStep]] = {name: [] for name in before}
    for number, lr in enumerate((1e-3, 2e-3, 3e-3, 3e-3), 1):
        parts.stepper.forward_backward(parts.train_loader.take(8), number)
        rate = float(torch.tensor(lr))
        for piece in parts.pieces:
            decay = float(torch.tensor(0.1)) if piece.parameter.decays else 0.0
            steps[piece.name].append(DenseStep(piece.gradient / (8 * 16), rate, decay))
        parts.stepper.update(lr, 0.1)
    for piece in parts.pieces:
        y, x = published(before[piece.name], steps[piece.name], run.config.optimizer)
        torch.testing.assert_close(piece.master, y, rtol=1e-7, atol=1e-9)
        average = parts.optimizer.state(piece)[AVERAGE]
        torch.testing.assert_close(average, x, rtol=1e-6, atol=1e-8)
    assert parts.optimizer.averages


def test_a_decay_of_the_rate_is_refused() -> None:
    with pytest.raises(UsageError, match=r"name=cosine lets the learning rate decay.*name=constant"):
        tiny_run({"optimizer.name": "schedulefree", "schedule.name": "cosine"})
