"""Sizes, keys and comparisons of the tests of building blocks."""

from collections.abc import Callable

import torch
from random_values import drawn
from torch import Tensor, nn

B, S, D, F_, V = 2, 5, 8, 12, 11
KEYS = torch.tensor([3, 4])
POSITIONS = torch.arange(S)[None]
Formula = Callable[[Tensor, dict[str, Tensor]], Tensor]


def assert_agree(
    module: nn.Module, run: Callable[[Tensor], Tensor], reference: Formula, x: Tensor, tolerance: float = 1e-12
) -> None:
    """Values and all gradients of `run` equal those of `reference`, for a random gradient of the output."""
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    weights = {name: p.detach().clone().requires_grad_() for name, p in module.named_parameters()}
    y, expected = run(ours), reference(theirs, weights)
    for one in (y, expected):
        one.backward(drawn(*y.shape, seed=9))
    found = {"output": y, "input": ours.grad, **{name: p.grad for name, p in module.named_parameters()}}
    right = {"output": expected, "input": theirs.grad, **{name: p.grad for name, p in weights.items()}}
    torch.testing.assert_close(found, right, rtol=tolerance, atol=tolerance)
