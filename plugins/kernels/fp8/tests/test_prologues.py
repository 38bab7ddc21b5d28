"""Norms and activations with the product of their result: what is kept for backward, and what ranks exchange."""

from typing import Any

import pytest
import torch
from mplug_fp8 import FP8Products
from prologues import O_, B, D, S, assert_exact, drawn, kept_and_statistic, kept_by, travelled
from torch import Tensor

from mplug.layout.plan import Init, Parameter
from mplug.model.build import build_model
from mplug.model.slots.offers import Offer, Site
from mplug.tensors.sink import Weights
from mplug_nn import Linear, Narrow
from mplug_nn.product import apply_product
from mplug_nn.prologue import ACTIVATION_PRODUCT, NORM_PRODUCT
from mplug_testing.harness import tiny_run
from mplug_testing.kernel_checks import initial

CASES = {NORM_PRODUCT: "layernorm", ACTIVATION_PRODUCT: "gelu_tanh"}
each = pytest.mark.parametrize("slot", CASES)


def offered(slot: str) -> tuple[Any, dict[str, Tensor]]:
    run: Any = tiny_run({"trainer.precision": "fp8", "precisions.fp8.when": "delayed"})
    offer: Offer = next(one for one in FP8Products(FP8Products.Config()).offer(run) if slot in one.suppliers)
    with torch.device("meta"):
        layer = Linear(D, O_, bias=False)
    weight = Parameter(("mlp", "embed"), Init("normal"))
    site = Site("blocks.*.up", slot, layer, "blocks.0.up", parameters={"weight": weight})
    return offer.suppliers[slot], initial(offer.buffers(site), torch.bfloat16, "cpu")


@each
def test_only_what_the_prologue_reads_is_kept_and_a_step_keeps_the_largest_result(slot: str) -> None:
    """Alone, the product also keeps its input in fp8."""
    product, buffers = offered(slot)
    kept, statistic, largest = kept_and_statistic(product, CASES[slot], buffers)
    assert kept == [(torch.bfloat16, (B, S, D))]
    assert statistic == pytest.approx(largest, rel=1e-2)
    alone, own = offered("Linear.product")
    x, weight = drawn(B, S, D).requires_grad_(), Weights(drawn(O_, D).requires_grad_())
    _, kept = kept_by(lambda: apply_product(alone, x, weight, Narrow(), own))
    assert kept == [(torch.float8_e4m3fn, (D, B * S))]


@each
@pytest.mark.parametrize("full", [True, False], ids=["full", "bare"])
def test_values_and_gradients_are_those_of_the_exact_composition(slot: str, full: bool) -> None:
    assert_exact(offered(slot)[0], CASES[slot], full, (B, S), lambda: offered(slot)[1])


@each
def test_fp8_numbers_travel_between_the_prologue_and_the_product(slot: str) -> None:
    found = travelled(offered(slot)[0], CASES[slot], "before", lambda: offered(slot)[1])
    assert {dtype for dtype, _ in found} == {torch.float8_e4m3fn}


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
    run = tiny_run({"trainer.precision": "fp8", "kernels.linear": "fp8", "trainer.base_modules": ["head"], **settings})
    return dict(run.hooks.each("captures", run=run, model=build_model(run)))["kernels/fp8"]


def test_a_cuda_graph_replays_the_products_that_a_gpu_has_replayed() -> None:
    delayed = {"precisions.fp8.when": "delayed"}
    fused = {"kernels.norm_product": "fp8", "kernels.activation_product": "fp8"}
    assert captures({}) is captures(delayed) is captures({**delayed, **fused}) is True
    found = captures({"precisions.fp8.scaling": "rowwise"})
    assert found == "has not been tested in a CUDA graph with Linear.product by 'fp8-rowwise'"
