"""Norms with the product of their result around Transformer Engine's functions, by stand-ins in plain torch.

n rows of a rank, D in, O out.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from engine_in_torch import stand_ins
from mplug_te.linear import DelayedProduct
from mplug_te.prologues import NormProduct
from mplug_te.recipes import INPUT, Options, delayed_scaling_of
from torch import Tensor

from mplug import Offer, Site
from mplug.layout.plan import Init, Parameter
from mplug.model.build import build_model
from mplug.tensors.sink import Weights
from mplug_nn import Boundary, Inputs, Linear, Narrow, Prologue
from mplug_nn.prologue import apply_fused
from mplug_testing.delayed_gradient_checks import later_fault
from mplug_testing.fused import composed
from mplug_testing.harness import difference, tiny_run, train_steps
from mplug_testing.kernel_buffer_checks import BufferTrial

B, S, D, O_ = 2, 32, 64, 128
OPTIONS = Options(history=3, power_of_two=True)
PRODUCT = NormProduct(DelayedProduct(OPTIONS.forward, OPTIONS.gradient, OPTIONS.power_of_two))
SCALING = delayed_scaling_of(OPTIONS)
OFFER = Offer({"Linear.norm_product": PRODUCT}, buffers=SCALING.buffers, step_ended=SCALING.step_ended)


@pytest.fixture(autouse=True)
def engine() -> Iterator[None]:
    """Transformer Engine's functions in plain torch."""
    with stand_ins():
        yield


def drawn(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return (scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).bfloat16()


def buffers() -> dict[str, Tensor]:
    with torch.device("meta"):
        layer = Linear(D, O_, bias=False)
    weight = Parameter(("mlp", "embed"), Init("normal"))
    site = Site("blocks.*.part", "Linear.norm_product", layer, "blocks.0.part", parameters={"weight": weight})
    return {name: torch.full(one.shape, one.value) for name, one in SCALING.buffers(site).items()}


def gradients(call: Any, inputs: Inputs, weight: Tensor, grads: tuple[Tensor, Tensor]) -> list[Tensor]:
    """The outputs, and the gradients of all inputs and of the weight."""
    leaves = [one.clone().requires_grad_() for one in (*inputs, weight) if one is not None]
    given = iter(leaves)
    own = Inputs(*(None if one is None else next(given) for one in inputs))  # type: ignore[arg-type]
    y, summed = call(own, next(given))
    torch.autograd.backward([y, summed], list(grads))
    return [y.detach(), summed.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


@pytest.mark.parametrize("rows", [(B, S), (3, 7)], ids=str)
@pytest.mark.parametrize("full", [True, False], ids=["full", "bare"])
@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
def test_values_and_gradients_are_those_of_the_exact_composition(kind: str, full: bool, rows: tuple[int, ...]) -> None:
    inputs = Inputs(
        drawn(*rows, D), drawn(*rows, D, seed=1) if full else None, 1 + drawn(D, seed=2, scale=0.2),
        drawn(D, seed=3, scale=0.2) if full else None,
    )  # fmt: skip
    weight, grads = drawn(O_, D, seed=4, scale=0.1), (drawn(*rows, O_, seed=5), drawn(*rows, D, seed=6))
    prologue = Prologue(kind, 1e-5)

    def fused(own: Inputs, matrix: Tensor) -> Any:
        return apply_fused(PRODUCT, prologue, own, Weights(matrix), Narrow(), buffers())

    wide = Inputs(*(None if one is None else one.double() for one in inputs))  # type: ignore[arg-type]
    of_outputs = grads[0].double(), grads[1].double()
    exact = gradients(lambda own, matrix: composed(prologue, own, matrix), wide, weight.double(), of_outputs)
    found = gradients(fused, inputs, weight, grads)
    assert len(found) == len(exact) == 2 + 3 + 2 * full
    for one, right in zip(found, exact, strict=True):
        assert one.shape == right.shape
        assert float((one.double() - right).norm() / right.norm()) < 0.1


def test_fp8_numbers_travel_between_ranks_and_nothing_in_bf16_but_the_stream_is_kept() -> None:
    travelled, kept = [], []

    def whole(part: Tensor) -> Tensor:
        travelled.append((part.dtype, part.shape[1]))
        return torch.cat((part, part), 1)

    def keep(tensor: Tensor) -> Tensor:
        kept.append((tensor.dtype, tuple(tensor.shape)))
        return tensor

    boundary = Boundary(whole, lambda y: y[:, :S] + y[:, S:], lambda x: x)
    inputs, own = Inputs(drawn(B, S, D).requires_grad_(), None, drawn(D), None), buffers()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        narrow = Narrow(before=boundary)
        y, _ = apply_fused(
            PRODUCT, Prologue("rmsnorm", 1e-5), inputs, Weights(drawn(O_, D).requires_grad_()), narrow, own
        )
        y.sum().backward()
    assert travelled == [(torch.uint8, S)] * 2
    large = {one for one in kept if len(one[1]) == 3}
    assert large == {(torch.bfloat16, (B, S, D)), (torch.uint8, (B, S, D))}
    assert float(own[INPUT]) > 0


def test_the_checks_of_the_suite_pass() -> None:
    assert later_fault(OFFER, "Linear.norm_product", torch.bfloat16, "cpu", compiles=True) == ""
    assert BufferTrial(OFFER, "Linear.norm_product", torch.bfloat16, "cpu", "delayed").fault(compiles=False) == ""


RUN: dict[str, Any] = {"trainer.precision": "te-fp8", "trainer.base_modules": ["head"], "kernels.linear": "te"}


def test_a_run_that_names_it_fills_the_slots_of_blocks_and_stays_near_the_run_without() -> None:
    named = {**RUN, "kernels.norm_product": "te"}
    model = build_model(tiny_run(named))
    filled = [one for one in model.slots if one.site.slot == "Linear.norm_product"]
    assert {(one.site.role, one.supplier) for one in filled} == {
        ("blocks.*.attn.qkv", "kernels/te"),
        ("blocks.*.mlp.up", "kernels/te"),
    }
    found, plain = train_steps(named), train_steps(RUN)
    assert found.losses != plain.losses
    assert difference([found], plain, 0.4) == ""
