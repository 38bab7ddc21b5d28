"""Activations with the product of their result around Transformer Engine's functions, by stand-ins in plain torch.

n rows of a rank, D in, O out.
"""

from collections.abc import Iterator
from typing import Any
from warnings import catch_warnings

import pytest
import torch
from engine_in_torch import stand_ins
from mplug_te.activations import FUNCTIONS, GATED, ActivationProduct
from mplug_te.linear import DelayedProduct
from mplug_te.recipes import INPUT, Options, delayed_scaling_of
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from mplug import Offer, Site
from mplug.layout.plan import Init, Parameter
from mplug.model.build import build_model
from mplug.model.compiled.tracer import prepare_compiler
from mplug.tensors.delayed import Later, Taps, without_memory
from mplug.tensors.sink import Sink, Weights
from mplug_nn import Boundary, DelayedScaling, Inputs, Linear, Narrow, Prologue
from mplug_nn.prologue import apply_fused
from mplug_testing.delayed_gradient_checks import later_fault
from mplug_testing.fused import composed
from mplug_testing.harness import difference, tiny_run, train_steps
from mplug_testing.kernel_buffer_checks import BufferTrial

B, S, D, O_ = 2, 24, 64, 128
OPTIONS = Options(history=3, power_of_two=True)
PRODUCT = ActivationProduct(DelayedProduct(OPTIONS.forward, OPTIONS.gradient, OPTIONS.power_of_two))


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
    weight = Parameter(("embed", "mlp"), Init("normal"))
    site = Site("blocks.*.part", "Linear.activation_product", layer, "blocks.0.part", parameters={"weight": weight})
    declared = delayed_scaling_of(OPTIONS).buffers(site)
    return {name: torch.full(one.shape, one.value) for name, one in declared.items()}


def inputs_of(kind: str, has_bias: bool, rows: tuple[int, ...] = (B, S)) -> Inputs:
    width = D * (2 if kind in GATED else 1)
    bias = drawn(width, seed=2).requires_grad_() if has_bias else None
    return Inputs(drawn(*rows, width, seed=1).requires_grad_(), bias=bias)


def error(found: Tensor, right: Tensor) -> float:
    return float((found.detach().double() - right.detach().double()).norm() / right.detach().double().norm())


@pytest.mark.parametrize("has_bias", [True, False], ids=["bias", ""])
@pytest.mark.parametrize("kind", FUNCTIONS)
def test_values_and_gradients_are_those_of_the_exact_composition(kind: str, has_bias: bool) -> None:
    inputs, grad = inputs_of(kind, has_bias, (3, 7)), drawn(3, 7, O_, seed=5)
    weight = drawn(O_, D, seed=4, scale=0.1).requires_grad_()
    wide = Inputs(*(None if one is None else one.detach().double().requires_grad_() for one in inputs))  # type: ignore[arg-type]
    matrix = weight.detach().double().requires_grad_()
    exact, _ = composed(Prologue(kind), wide, matrix)
    exact.backward(grad.double())
    y = apply_fused(PRODUCT, Prologue(kind), inputs, Weights(weight), Narrow(), buffers())
    y.backward(grad)
    assert error(y, exact) < 0.1
    pairs = [(inputs.x, wide.x), (weight, matrix), *([(inputs.bias, wide.bias)] if has_bias else [])]
    for leaf, right in pairs:
        assert leaf is not None
        assert right is not None
        assert leaf.grad is not None
        assert right.grad is not None
        assert leaf.grad.dtype == leaf.dtype
        assert error(leaf.grad, right.grad) < 0.1


def test_only_what_the_activation_reads_is_kept_and_the_statistics_are_those_of_its_result() -> None:
    kept: list[tuple[torch.dtype, tuple[int, ...]]] = []

    def keep(tensor: Tensor) -> Tensor:
        if tensor.dim() == 3:
            kept.append((tensor.dtype, tuple(tensor.shape)))
        return tensor

    inputs, own = inputs_of("swiglu", False), buffers()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        y = apply_fused(PRODUCT, Prologue("swiglu"), inputs, Weights(drawn(O_, D).requires_grad_()), Narrow(), own)
    largest = float(own[INPUT])
    y.sum().backward()
    assert kept == [(torch.bfloat16, (B, S, 2 * D))]
    gate, up = inputs.x.detach().float().chunk(2, dim=-1)
    assert largest == float(own[INPUT]) == pytest.approx(float((torch.nn.functional.silu(gate) * up).abs().max()))
    own[DelayedScaling.scale_name(INPUT)].fill_(1e4)  # so large that all values are cut off
    cut = apply_fused(PRODUCT, Prologue("swiglu"), inputs, Weights(drawn(O_, D)), Narrow(), own)
    assert error(cut, y) > 0.5


@pytest.mark.parametrize("side", ["before", "after"])
def test_the_collectives_of_a_boundary_give_the_product_of_the_whole_and_numbers_travel_in_fp8(side: str) -> None:
    """Two equal ranks: each has the same half of the sequence."""
    travelled: list[torch.dtype] = []

    def whole(part: Tensor) -> Tensor:
        travelled.append(part.dtype)
        return torch.cat((part, part), 1)

    boundary = Boundary(whole, lambda y: y[:, :S] + y[:, S:], lambda x: x)
    inputs = inputs_of("gelu_tanh", True, (B, S if side == "before" else 2 * S))
    matrix, prologue = drawn(O_, D, seed=6, scale=0.1).requires_grad_(), Prologue("gelu_tanh")
    y = apply_fused(PRODUCT, prologue, inputs, Weights(matrix), Narrow(**{side: boundary}), buffers())
    exact, _ = composed(prologue, inputs, matrix)
    exact = torch.cat((exact, exact), 1) if side == "before" else boundary.summed(exact)
    grad = drawn(*y.shape, seed=7)
    leaves = [inputs.x, inputs.bias, matrix]
    assert error(y, exact) < 0.1
    for one, right in zip(torch.autograd.grad(y, leaves, grad), torch.autograd.grad(exact, leaves, grad), strict=True):
        assert error(one, right) < 0.1
    assert set(travelled) == {torch.uint8}


@pytest.mark.wide("compile")
def test_it_traces_into_one_graph_and_its_weight_gradient_can_be_computed_later() -> None:
    prepare_compiler()
    torch.compiler.reset()
    compiled = torch.compile(apply_fused, backend="aot_eager", fullgraph=True)
    outcomes, declared = [], list[tuple[Tensor, ...]]()
    plain = Weights(drawn(O_, D, seed=4))
    given = PRODUCT, Prologue("swiglu"), inputs_of("swiglu", False), plain, Narrow(), buffers(), ()
    with FakeTensorMode(allow_non_fake_inputs=True):
        apply_fused(*given, Later(declare=declared.append))
    taps = Taps(map(without_memory, declared[0]), torch.device("cpu"))
    for call, later in ((apply_fused, None), (compiled, None), (apply_fused, taps.later)):
        inputs, sink = inputs_of("swiglu", False), Sink(torch.full((O_, D), 5.0), torch.ones((), dtype=torch.bool))
        weight = Weights(drawn(O_, D, seed=4).requires_grad_(), *sink)
        with catch_warnings(action="ignore"):  # torch's own, as it traces
            y = call(PRODUCT, Prologue("swiglu"), inputs, weight, Narrow(), buffers(), (), later)
        y.backward(drawn(B, S, O_, seed=5))
        if later is not None:
            operands = taps.take()
            assert operands is not None
            assert PRODUCT.wgrad(operands, sink, Narrow(), buffers()) is None
        outcomes.append([y.detach(), inputs.x.grad, sink.total])
    for other in outcomes[1:]:
        assert all(map(torch.equal, outcomes[0], other))


@pytest.mark.parametrize("kind", ["swiglu", pytest.param("gelu_tanh", marks=pytest.mark.wide("precision"))])
def test_the_checks_of_the_suite_pass(kind: str) -> None:
    scaling, slot = delayed_scaling_of(OPTIONS), "Linear.activation_product"
    offer = Offer({slot: PRODUCT}, buffers=scaling.buffers, step_ended=scaling.step_ended)
    assert later_fault(offer, slot, torch.bfloat16, "cpu", compiles=False, kind=kind) == ""
    assert BufferTrial(offer, slot, torch.bfloat16, "cpu", "delayed", kind).fault(compiles=False) == ""


RUN: dict[str, Any] = {
    "trainer.precision": "te-fp8",
    "trainer.base_modules": ["head"],
    "kernels.linear": "te",
    "model.activation": "swiglu",
}


NAMED = {**RUN, "kernels.activation_product": "te"}


def test_a_run_that_names_it_fills_the_slots_of_blocks() -> None:
    filled = [one for one in build_model(tiny_run(NAMED)).slots if one.site.slot == "Linear.activation_product"]
    assert {(one.site.role, one.supplier) for one in filled} == {("blocks.*.mlp.down", "kernels/te")}


@pytest.mark.wide("precision")
def test_a_run_with_fused_activations_stays_near_the_run_without() -> None:
    found, plain = train_steps(NAMED), train_steps(RUN)
    assert found.losses != plain.losses
    assert difference([found], plain, 0.4) == ""
