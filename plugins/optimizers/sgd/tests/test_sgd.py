"""SGD over pieces: mplug's suite against torch.optim.SGD in fp64, in every variant."""

import pytest
import torch
from mplug_sgd import SGD
from torch import Tensor

from mplug import Parameter
from mplug_testing import DenseStep, OptimizerSuite


@pytest.mark.wide("reshard", tests=["test_a_layout_gives_the_weights_of_one_process"], quick=["fsdp2"])
class TestSGD(OptimizerSuite):
    plugin = "sgd"
    layouts = ("pp2", "fsdp2")
    beside = {"decoupled_weight_decay": {"optimizer.weight_decay": 0.5}}

    def reference(self, weight: Tensor, steps: list[DenseStep], parameter: Parameter, config: SGD.Config) -> Tensor:
        dense = torch.nn.Parameter(weight.clone())
        torchs = torch.optim.SGD([dense], momentum=config.momentum, nesterov=config.nesterov, foreach=False)
        for gradient, lr, decay in steps:
            dense.grad = gradient
            if config.decoupled_weight_decay:
                dense.data *= 1 - lr * decay
            torchs.param_groups[0].update(lr=lr, weight_decay=0.0 if config.decoupled_weight_decay else decay)
            torchs.step()
        return dense.detach()


class TestWithNesterov(TestSGD):
    checks_fields = False
    settings = {"optimizer.nesterov": True, "optimizer.momentum": 0.95}
    layouts = ()


class TestWithDecoupledDecay(TestSGD):
    settings = {"optimizer.decoupled_weight_decay": True}
    layouts = ()


class TestWithoutMomentum(TestSGD):
    checks_fields = False
    settings = {"optimizer.momentum": 0.0}
    layouts = ()

    def test_it_keeps_no_state(self) -> None:
        assert not list(self._bench().states())


@pytest.mark.gpu
class TestOnAGPU(TestSGD):
    settings = {"trainer.device": "cuda"}
    layouts = ()
