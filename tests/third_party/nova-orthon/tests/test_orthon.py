"""Orthon against mplug's own suite of optimizers, and against Muon and Adam written out matrix by matrix."""

from typing import Any

import torch
from torch import Tensor

from mplug import Parameter
from mplug_testing import DenseStep, OptimizerSuite


class TestOrthon(OptimizerSuite):
    plugin = "orthon"
    examples = {"tables": [[]]}

    def reference(self, weight: Tensor, steps: list[DenseStep], parameter: Parameter, config: Any) -> Tensor:
        matrix = weight.dim() == 2 and "vocab" not in parameter.axes
        return muon(weight, steps, config) if matrix else adam(weight, steps, config)


def muon(weight: Tensor, steps: list[DenseStep], config: Any) -> Tensor:
    momentum = torch.zeros_like(weight)
    for gradient, lr, decay in steps:
        momentum = config.momentum * momentum + gradient
        u, values, vh = torch.linalg.svd(gradient + config.momentum * momentum, full_matrices=False)
        values = values / values.norm()
        for _ in range(5):  # the polynomial acts on singular values
            values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
        update = config.rms * max(weight.shape) ** 0.5 * (u * values) @ vh
        weight = (1 - lr * decay) * weight - lr * update
    return weight


def adam(weight: Tensor, steps: list[DenseStep], config: Any) -> Tensor:
    first, second = torch.zeros_like(weight), torch.zeros_like(weight)
    for number, (gradient, lr, decay) in enumerate(steps, start=1):
        first = config.beta1 * first + (1 - config.beta1) * gradient
        second = config.beta2 * second + (1 - config.beta2) * gradient**2
        root = (second / (1 - config.beta2**number)).sqrt() + config.eps
        weight = (1 - lr * decay) * weight - lr * first / (1 - config.beta1**number) / root
    return weight
