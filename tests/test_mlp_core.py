"""A supplier of `MLP.core` under strategies: what it does not call, it must not be missing.

The supplier fuses in plain torch: products and activation in one function of autograd, which gives the weights'
gradients to their sinks itself.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import mplug.model.build
from mplug import Offer
from mplug_nn import Weights, weight_gradient
from mplug_testing.harness import Trace, difference, train_steps, weights_off
from mplug_testing.workers import run_workers

GELU = {"model.activation": "gelu", "model.bias": True}


class Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor, *weights: Any) -> Tensor:
        up, down = Weights(*weights[:3]), Weights(*weights[3:])
        h = x @ up.values.t() + bias
        ctx.save_for_backward(x, h, up.values, down.values)
        ctx.sinks = up[1:], down[1:]
        return F.gelu(h) @ down.values.t()

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> Any:
        x, h, *values = ctx.saved_tensors
        up, down = (Weights(one, *sink) for one, sink in zip(values, ctx.sinks, strict=True))
        slope = 0.5 * (1 + torch.erf(h * 0.5**0.5)) + h * torch.exp(-0.5 * h * h) * (2 * torch.pi) ** -0.5
        grad_h = (grad_y @ down.values) * slope
        grad_down, grad_up = weight_gradient(grad_y, F.gelu(h), down), weight_gradient(grad_h, x, up)
        return grad_h @ up.values, grad_h.flatten(0, -2).sum(0), grad_up, None, None, grad_down, None, None


def fused(
    x: Tensor, up: Weights, bias: Tensor, down: Weights, kind: str, composed: Callable[[Tensor], Tensor]
) -> Tensor:
    assert kind == "gelu"
    y: Tensor = Fused.apply(x, bias, *up, *down)
    return y


def offer_it() -> None:
    """Let this process's models have it."""
    original = mplug.model.build.collect_offers
    offer = Offer({"MLP.core": fused}, plugin="parallel/fused")
    mplug.model.build.collect_offers = lambda run, model: [*original(run, model), offer]  # type: ignore[assignment]


@cache
def alone() -> Trace:
    return train_steps(GELU)


@pytest.mark.parametrize("more", [{}, {"trainer.compile": "aot_eager"}], ids=["eager", "compiled"])
@pytest.mark.filterwarnings("ignore")  # torch's own, as it traces
@pytest.mark.wide("compile", quick=["eager"])
def test_it_is_the_run_of_the_narrower_slots(monkeypatch: pytest.MonkeyPatch, more: dict[str, Any]) -> None:
    expected = alone()  # before anything is offered
    monkeypatch.setattr(mplug.model.build, "collect_offers", mplug.model.build.collect_offers)  # is put back in the end
    found = train_steps(GELU | more, offer_it)
    assert difference([found], expected) == ""
    assert weights_off([found], expected) == ""


@pytest.mark.parametrize("layout", ["tp2", "zero2", "fsdp2", "pp2", "cp2"])
@pytest.mark.filterwarnings("ignore")
@pytest.mark.wide("layouts")
def test_it_is_the_run_of_one_process_under_every_strategy(layout: str) -> None:
    found = run_workers(2, train_steps, GELU | {"parallel.layout": layout}, offer_it)
    assert difference(found, alone()) == ""
    assert weights_off(found, alone()) == ""
