"""AdamW over pieces, against the paper's algorithm in fp64."""

from importlib.util import find_spec

import pytest
import torch
from mplug_adamw import AdamW
from torch import Tensor

from mplug import Parameter
from mplug_testing import DenseStep, OptimizerSuite


class TestAdamW(OptimizerSuite):
    plugin = "adamw"
    layouts = ("pp2", "fsdp2")

    def reference(self, weight: Tensor, steps: list[DenseStep], parameter: Parameter, config: AdamW.Config) -> Tensor:
        """Algorithm 2 of arXiv 1711.05101, with the decay that is decoupled multiplied by the learning rate."""
        first, second = torch.zeros_like(weight), torch.zeros_like(weight)
        for number, (gradient, lr, decay) in enumerate(steps, 1):
            first = config.beta1 * first + (1 - config.beta1) * gradient
            second = config.beta2 * second + (1 - config.beta2) * gradient**2
            unbiased = first / (1 - config.beta1**number), second / (1 - config.beta2**number)
            weight = weight * (1 - lr * decay) - lr * unbiased[0] / (unbiased[1].sqrt() + config.eps)
        return weight


class TestWithOtherMoments(TestAdamW):
    settings = {"optimizer.beta1": 0.5, "optimizer.beta2": 0.999, "optimizer.eps": 1e-3}
    layouts = ()
    checks_fields = False


class TestWithoutAFirstMoment(TestWithOtherMoments):
    settings = {"optimizer.beta1": 0.0, "optimizer.eps": 1e-6}


@pytest.mark.gpu
@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
class TestOnAGPU(TestAdamW):
    settings = {"trainer.device": "cuda"}
    layouts = ()

    def test_it_says_one_pass(self) -> None:
        assert self._bench().optimizer.one_pass
