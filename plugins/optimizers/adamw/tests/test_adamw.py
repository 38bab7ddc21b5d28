"""AdamW over pieces, against the paper's algorithm in fp64."""

from importlib.util import find_spec

import pytest
import torch
from mplug_adamw import AdamW
from mplug_adamw.rounded import rounded
from torch import Tensor

from mplug import Parameter
from mplug.tensors.random import mix
from mplug_testing import DenseStep, OptimizerSuite, dense


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


@pytest.mark.wide("reshard", tests=["test_a_layout_gives_the_weights_of_one_process"])
class TestWithMomentsInBF16(TestAdamW):
    """The reference has exact moments; a rounding is at most 2^-7 of a moment."""

    settings = {"optimizer.moments": "bf16", "optimizer.eps": 1e-3}
    layouts = ("fsdp2tp2",)
    tolerance = 0.03
    checks_fields = False


def test_stochastic_rounding_gives_a_neighbour_in_bf16_and_is_exact_on_average() -> None:
    """Of both signs and many sizes, and of what bf16 has, nothing changes."""
    values = dense.drawn((64,), "cpu", "x") * torch.logspace(-20, 20, 64)
    draws = torch.arange(1 << 14)
    found = rounded(values[:, None].expand(-1, len(draws)).contiguous(), mix(draws)).double()
    down = (values.view(torch.int32) & -(1 << 16)).view(torch.float32).double()[:, None]
    up = ((values.view(torch.int32) & -(1 << 16)) + (1 << 16)).view(torch.float32).double()[:, None]
    assert bool(((found == down) | (found == up)).all())
    share = (found.mean(dim=1) - down[:, 0]) / (up - down)[:, 0]
    expected = (values.double() - down[:, 0]) / (up - down)[:, 0]
    assert float((share - expected).abs().max()) < 0.02  # five standard errors of 16,384 draws
    exact = values.bfloat16().float()
    assert torch.equal(rounded(exact, mix(torch.arange(64))).float(), exact)


@pytest.mark.gpu
@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
class TestOnAGPU(TestAdamW):
    settings = {"trainer.device": "cuda"}
    layouts = ()

    def test_it_says_one_pass(self) -> None:
        assert self._bench().optimizer.one_pass
