"""Norms and activations with the product of their result around Transformer Engine's functions, by stand-ins.

n rows of a rank, D in, O out. `TestDelayedProducts` of `test_linear.py` runs the suite's checks on them.
"""

from typing import Any

import pytest
import torch
from engine_in_torch import drawn, engine, error
from mplug_te.activations import FUNCTIONS, GATED, ActivationProduct
from mplug_te.linear import DelayedProduct
from mplug_te.prologues import NormProduct
from mplug_te.recipes import GRADIENT, INPUT, Options
from torch import Tensor

from mplug.tensors.sink import Weights
from mplug_nn import Boundary, DelayedScaling, FusedProduct, Inputs, Narrow, Prologue
from mplug_nn.prologue import apply_fused
from mplug_testing.fused import composed

__all__ = ["engine"]
B, S, D, O_ = 2, 24, 64, 128
OPTIONS = Options()
DELAYED = DelayedProduct(OPTIONS.forward, OPTIONS.gradient, OPTIONS.power_of_two)
NORMS = ("layernorm", "rmsnorm")


def product(kind: str) -> FusedProduct:
    return NormProduct(DELAYED) if kind in NORMS else ActivationProduct(DELAYED)


def buffers() -> dict[str, Tensor]:
    scales = {"input_scale": torch.full((1,), 16.0), "gradient_scale": torch.full((1,), 256.0)}
    return {INPUT: torch.zeros(()), GRADIENT: torch.zeros(()), **scales}


def inputs_of(kind: str, full: bool, *rows: int) -> Inputs:
    """Of a norm or an activation; `full`: with a bias, and a residual if there may be one."""
    if kind not in NORMS:
        width = D * (2 if kind in GATED else 1)
        return Inputs(drawn(*rows, width, seed=1), bias=drawn(width, seed=2) if full else None)
    residual, bias = (drawn(*rows, D, seed=3), drawn(D, seed=4, scale=0.2)) if full else (None, None)
    return Inputs(drawn(*rows, D, seed=1), residual, 1 + drawn(D, seed=2, scale=0.2), bias)


def outcome(call: Any, inputs: Inputs, weight: Tensor, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    """The outputs of a call with inputs and a weight, and the gradients of all of them."""
    leaves = [one.to(dtype, copy=True).requires_grad_() for one in (*inputs, weight) if one is not None]
    given = iter(leaves)
    found = call(Inputs(*(None if one is None else next(given) for one in inputs)), next(given))
    outputs = [one for one in (found if isinstance(found, tuple) else (found,)) if one is not None]
    upstream = [drawn(*one.shape, seed=5 + number).to(dtype) for number, one in enumerate(outputs)]
    return [*outputs, *torch.autograd.grad(outputs, leaves, upstream)]


@pytest.mark.parametrize("full", [True, False], ids=["full", "bare"])
@pytest.mark.parametrize("kind", [*NORMS, *FUNCTIONS])
def test_values_and_gradients_are_those_of_the_exact_composition(kind: str, full: bool) -> None:
    prologue, weight = Prologue(kind, 1e-5), drawn(O_, D, seed=4, scale=0.1)
    for rows in ((B, S), (3, 7)):
        inputs = inputs_of(kind, full, *rows)
        exact = outcome(lambda own, matrix: composed(prologue, own, matrix), inputs, weight, torch.float64)
        found = outcome(
            lambda own, matrix: apply_fused(product(kind), prologue, own, Weights(matrix), Narrow(), buffers()),
            inputs,
            weight,
        )
        assert len(found) == len(exact)
        for one, right in zip(found, exact, strict=True):
            assert (one.shape, one.dtype) == (right.shape, torch.bfloat16)
            assert error(one, right) < 0.1


@pytest.mark.parametrize(("kind", "side"), [("rmsnorm", "before"), ("gelu_tanh", "before"), ("gelu_tanh", "after")])
def test_the_collectives_of_a_boundary_give_the_product_of_the_whole_and_numbers_travel_in_fp8(
    kind: str, side: str
) -> None:
    """Two equal ranks: each has the same half of the sequence."""
    travelled: list[tuple[torch.dtype, int]] = []

    def whole(part: Tensor) -> Tensor:
        travelled.append((part.dtype, part.shape[1]))
        return torch.cat((part, part), 1)

    boundary = Boundary(whole, lambda y: y[:, :S] + y[:, S:], lambda x: x)
    inputs = inputs_of(kind, True, B, S if side == "before" else 2 * S)
    prologue, weight = Prologue(kind, 1e-5), drawn(O_, D, seed=6, scale=0.1)

    def fused(own: Inputs, matrix: Tensor) -> Any:
        narrow = Narrow(**{side: boundary})
        return apply_fused(product(kind), prologue, own, Weights(matrix), narrow, buffers())

    def plain(own: Inputs, matrix: Tensor) -> Any:
        y, summed = composed(prologue, own, matrix)
        return torch.cat((y, y), 1) if side == "before" else boundary.summed(y), summed

    for one, right in zip(outcome(fused, inputs, weight), outcome(plain, inputs, weight), strict=True):
        assert error(one, right) < 0.1
    assert travelled == [(torch.uint8, S)] * (2 if side == "before" else 1)


@pytest.mark.parametrize(
    ("kind", "copies", "rounding"), [("rmsnorm", [(torch.uint8, (B, S, D))], 1e-2), ("swiglu", [], 1e-6)]
)
def test_in_bf16_only_what_the_prologue_reads_is_kept_and_the_statistics_are_those_of_its_result(
    kind: str, copies: list[Any], rounding: float
) -> None:
    """A norm rounds to bf16, and keeps the fp8 numbers. `composed` with the unit matrix gives its result."""
    kept: list[tuple[torch.dtype, tuple[int, ...]]] = []

    def keep(tensor: Tensor) -> Tensor:
        if tensor.dim() == 3:
            kept.append((tensor.dtype, tuple(tensor.shape)))
        return tensor

    inputs, own = inputs_of(kind, False, B, S), buffers()
    result, _ = composed(Prologue(kind, 1e-5), wide(inputs), torch.eye(D))
    inputs.x.requires_grad_()
    call = product(kind), Prologue(kind, 1e-5), inputs, Weights(drawn(O_, D).requires_grad_()), Narrow(), own
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        first = outputs_of(apply_fused(*call))
    assert kept == [(torch.bfloat16, tuple(inputs.x.shape)), *copies]
    assert float(own[INPUT]) == pytest.approx(float(result.abs().max()), rel=rounding)
    before = float(own[INPUT])
    first.sum().backward()
    assert float(own[INPUT]) == before
    own[DelayedScaling.scale_name(INPUT)].fill_(1e4)  # so large that all values are cut off
    assert error(outputs_of(apply_fused(*call)), first) > 0.5


def wide(inputs: Inputs) -> Inputs:
    return Inputs(*(None if one is None else one.float() for one in inputs))


def outputs_of(found: Any) -> Tensor:
    """The product, without the residual stream of a norm."""
    y: Tensor = found[0] if isinstance(found, tuple) else found
    return y
