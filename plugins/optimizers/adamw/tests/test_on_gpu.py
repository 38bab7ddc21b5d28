"""On a GPU: the suite finds AdamW in one pass; its layouts are tried on CPUs."""

from typing import Any

import pytest
import torch
from mplug_adamw import AdamW
from torch import Tensor

from mplug_testing import DenseStep, OptimizerSuite

pytest.importorskip("triton")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA GPU here")]


class TestAdamWInOnePass(OptimizerSuite):
    plugin = "adamw"
    settings = {"trainer.device": "cuda"}
    layouts = ()

    def reference(self, weight: Tensor, steps: list[DenseStep], parameter: Any, config: AdamW.Config) -> Tensor:
        torchs = torch.nn.Parameter(weight.clone())
        adamw = torch.optim.AdamW([torchs], betas=(config.beta1, config.beta2), eps=config.eps, foreach=False)
        for gradient, lr, decay in steps:
            torchs.grad = gradient
            adamw.param_groups[0].update(lr=lr, weight_decay=decay)
            adamw.step()
        return torchs.detach()

    def test_it_says_one_pass(self) -> None:
        assert self._bench().optimizer.one_pass
