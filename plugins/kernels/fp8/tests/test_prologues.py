"""Norms and activations with the product of their result: what is kept for backward, and what ranks exchange."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from mplug_fp8 import FP8Products
from mplug_fp8.recipes import INPUT
from torch import Tensor

from mplug.layout.plan import Init, Parameter
from mplug.model.build import build_model
from mplug.model.slots.offers import Offer, Site
from mplug.tensors.sink import Weights
from mplug_nn import Boundary, DelayedScaling, Inputs, Linear, Narrow, Prologue
from mplug_nn.product import apply_product
from mplug_nn.prologue import ACTIVATION_PRODUCT, NORM_PRODUCT, apply_fused
from mplug_testing.fused import composed
from mplug_testing.harness import tiny_run
from mplug_testing.kernel_checks import initial

B, S, D, O_ = 2, 16, 64, 16
CASES = {NORM_PRODUCT: "layernorm", ACTIVATION_PRODUCT: "gelu_tanh"}
each = pytest.mark.parametrize("slot", CASES)
Kept = list[tuple[torch.dtype, tuple[int, ...]]]


def offered(slot: str) -> tuple[Any, dict[str, Tensor]]:
    """The supplier of a slot by delayed scaling, and its buffers."""
    run: Any = tiny_run({"trainer.precision": "fp8", "precisions.fp8.when": "delayed"})
    offer: Offer = next(one for one in FP8Products(FP8Products.Config()).offer(run) if slot in one.suppliers)
    with torch.device("meta"):
        layer = Linear(D, O_, bias=False)
    weight = Parameter(("mlp", "embed"), Init("normal"))
    site = Site("blocks.*.up", slot, layer, "blocks.0.up", parameters={"weight": weight})
    return offer.suppliers[slot], initial(offer.buffers(site), torch.bfloat16, "cpu")


def drawn(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return (scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).bfloat16()


def inputs_of(slot: str) -> Inputs:
    x = drawn(B, S, D, seed=1).requires_grad_()
    if slot == ACTIVATION_PRODUCT:
        return Inputs(x, bias=drawn(D, seed=2).requires_grad_())
    weights = (1 + drawn(D, seed=3, scale=0.1)).requires_grad_(), drawn(D, seed=4).requires_grad_()
    return Inputs(x, drawn(B, S, D, seed=5).requires_grad_(), *weights)


def error(found: Tensor, right: Tensor) -> float:
    return float(((found - right).norm() / right.norm()).detach())


def kept_by(call: Callable[[], object]) -> Kept:
    """The dtypes and shapes of the large tensors that a call saves for backward, without weights."""
    kept: Kept = []

    def keep(tensor: Tensor) -> Tensor:
        if tensor.numel() >= B * S * D:
            kept.append((tensor.dtype, tuple(tensor.shape)))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        call()
    return kept


@each
def test_only_what_the_prologue_reads_is_kept_for_backward(slot: str) -> None:
    """Alone, the product also keeps its input in fp8."""
    product, buffers = offered(slot)
    inputs, weight = inputs_of(slot), Weights(drawn(O_, D, seed=6, scale=0.1).requires_grad_())
    prologue, narrow = Prologue(CASES[slot], 1e-5), Narrow()
    found = kept_by(lambda: apply_fused(product, prologue, inputs, weight, narrow, buffers))
    assert found == [(torch.bfloat16, (B, S, D))]
    alone, own = offered("Linear.product")
    single = kept_by(lambda: apply_product(alone, inputs.x, weight, narrow, own))
    assert single == [(torch.float8_e4m3fn, (D, B * S))]


@each
def test_fp8_numbers_travel_between_the_prologue_and_the_product(slot: str) -> None:
    """Two equal ranks: each has the same half of the sequence. The results are those of the whole."""
    travelled: list[torch.dtype] = []

    def whole(part: Tensor) -> Tensor:
        travelled.append(part.dtype)
        return torch.cat((part, part), 1)

    boundary = Boundary(whole, lambda y: y[:, :S] + y[:, S:], lambda x: x)
    product, buffers = offered(slot)
    inputs, matrix = inputs_of(slot), drawn(O_, D, seed=6, scale=0.1).requires_grad_()
    prologue = Prologue(CASES[slot], 1e-5)
    found = apply_fused(product, prologue, inputs, Weights(matrix), Narrow(before=boundary), buffers)
    y = found[0] if isinstance(found, tuple) else found
    grad = drawn(B, 2 * S, O_, seed=7)
    leaves = [one for one in (*inputs, matrix) if one is not None]
    gradients = torch.autograd.grad(y, leaves, grad)
    assert set(travelled) == {torch.float8_e4m3fn}
    half, _ = composed(prologue, inputs, matrix)
    exact = torch.cat((half, half), 1)
    assert error(y, exact) < 0.1
    for one, right in zip(gradients, torch.autograd.grad(exact, leaves, grad), strict=True):
        assert error(one, right) < 0.1


@each
def test_a_step_keeps_the_largest_result_and_uses_the_scale_of_the_state(slot: str) -> None:
    product, buffers = offered(slot)
    inputs, weight = inputs_of(slot), Weights(drawn(O_, D, seed=6, scale=0.1))
    call = product, Prologue(CASES[slot], 1e-5), inputs, weight, Narrow(), buffers
    first = apply_fused(*call)
    largest = float(buffers[INPUT])
    assert 1 < largest < 10
    buffers[DelayedScaling.scale_name(INPUT)].fill_(1e4)  # so large that all values are cut off
    second = apply_fused(*call)
    assert float(buffers[INPUT]) == largest
    one, other = (found[0] if isinstance(found, tuple) else found for found in (first, second))
    assert error(other, one) > 0.5


def test_norms_and_activations_outside_of_base_modules_are_fused() -> None:
    named = {"kernels.norm_product": "fp8", "kernels.activation_product": "fp8", "kernels.linear": "fp8"}
    delayed = {"trainer.precision": "fp8", "precisions.fp8.when": "delayed", "model.num_layers": 3}
    model = build_model(tiny_run({**named, **delayed}))
    filled = [one for one in model.slots if one.supplier == "kernels/fp8"]
    fused = {(one.site.name, one.site.slot) for one in filled if one.site.slot in CASES}
    assert fused == {
        ("blocks.1.attn.qkv", NORM_PRODUCT),
        ("blocks.1.mlp.up", NORM_PRODUCT),
        ("blocks.1.mlp.down", ACTIVATION_PRODUCT),
    }


def captures(settings: dict[str, Any]) -> Any:
    """Whether a CUDA graph can replay the plugin's part of a run."""
    run = tiny_run({"trainer.precision": "fp8", "kernels.linear": "fp8", "trainer.base_modules": ["head"], **settings})
    return dict(run.hooks.each("captures", run=run, model=build_model(run)))["kernels/fp8"]


def test_a_cuda_graph_replays_the_products_that_a_gpu_has_replayed() -> None:
    delayed = {"precisions.fp8.when": "delayed"}
    fused = {"kernels.norm_product": "fp8", "kernels.activation_product": "fp8"}
    assert captures({}) is captures(delayed) is captures({**delayed, **fused}) is True
    found = captures({"precisions.fp8.scaling": "rowwise"})
    assert found == "has not been tested in a CUDA graph with Linear.product by 'fp8-rowwise'"
