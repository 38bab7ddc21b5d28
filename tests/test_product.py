"""Whole products of linear layers: `acme-product` rounds its operands, and keeps rounded copies of the weights."""

import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import random_values
import torch
from layout_words import COMPILED, RECOMPUTED, WHOLE_STREAM, layouts, under
from random_values import drawn
from torch import Tensor

from mplug import Offer, UsageError
from mplug.model.build import build_model
from mplug.model.products import keep_casts
from mplug.model.slots.declaration import slot_of
from mplug_nn import (
    MLP,
    GatheredForm,
    GroupedProduct,
    Linear,
    Narrow,
    Operand,
    Product,
    Sink,
    add_product,
)
from mplug_products.slot_buffers import hold
from mplug_testing import run_workers
from mplug_testing.delayed_gradient_checks import later_fault
from mplug_testing.gathered_copy_checks import gathered_fault, gathered_forms
from mplug_testing.harness import difference, tiny_run, train_steps
from mplug_testing.kernel_buffer_checks import BufferTrial

Plant = Callable[..., None]
Settings = dict[str, Any]
SETTINGS: Settings = {"model.num_layers": 2, "kernels.linear": "product"}
B, S, I_, O_ = 2, 8, 6, 10


class Doubled(Product):
    """2 x Wᵀ by a copy of the weight; counts its casts."""

    num_casts = 0

    def cast(self, weight: Tensor, buffers: Any) -> tuple[Tensor, ...]:
        self.num_casts += 1
        return (2 * weight,)

    def forward(self, x: Tensor, weight: Operand, narrow: Narrow, buffers: Any) -> tuple[Tensor, tuple[Tensor, ...]]:
        return narrow.scattered(narrow.gathered(x) @ weight.casts[0].t()), (x,)

    def dgrad(self, grad_y: Tensor, weight: Operand, saved: Any, narrow: Narrow, buffers: Any, needs_x: bool) -> Any:
        grad_y = narrow.gathered_gradient(grad_y)
        return narrow.scattered_gradient(grad_y @ weight.casts[0]) if needs_x else None, (grad_y, *saved)

    def wgrad(self, operands: Any, sink: Sink | None, narrow: Narrow, buffers: Any) -> Tensor | None:
        grad_y, x = operands
        a, b = 2 * grad_y.flatten(0, -2).t(), narrow.gathered(x).flatten(0, -2)
        return a @ b if sink is None else add_product(*sink, a, b)


def filled(linear: Linear, product: Product | None = None) -> Linear:
    random_values.filled(linear)
    if product is not None:
        linear.product = product
    return linear


def test_a_product_gives_the_output_and_both_gradients() -> None:
    layer, plain = filled(Linear(I_, O_), Doubled()), filled(Linear(I_, O_))
    grad = drawn(B, S, O_, seed=8)
    found, expected = drawn(B, S, I_).requires_grad_(), (2 * drawn(B, S, I_)).requires_grad_()
    y, right = layer(found), plain(expected)
    for one in (y, right):
        one.backward(grad)
    ours, theirs = (y, found.grad, layer.weight.grad, layer.bias.grad), (right, 2 * expected.grad, plain.weight.grad)
    torch.testing.assert_close(ours, (*theirs, plain.bias.grad))


def test_the_weight_gradient_goes_to_the_sink_a_stale_sink_is_overwritten_and_a_frozen_weight_gets_none() -> None:
    layer, x, grad = filled(Linear(I_, O_), Doubled()), drawn(B, S, I_), drawn(B, S, O_, seed=8)
    sink = drawn(O_, I_, seed=7)
    layer.weight.main_grad = sink  # type: ignore[attr-defined]
    layer.weight.main_grad_stale = torch.ones((), dtype=torch.bool)  # type: ignore[attr-defined]
    for number in (1, 2):
        layer(x).backward(grad)
        torch.testing.assert_close(sink, 2 * number * torch.einsum("bso,bsi->oi", grad, x))
    layer.weight.requires_grad_(False)
    layer(x.requires_grad_()).sum().backward()
    assert layer.weight.grad is None
    torch.testing.assert_close(x.grad, torch.ones(B, S, O_, dtype=x.dtype) @ (2 * layer.weight))


@pytest.mark.filterwarnings("ignore")  # torch's own, as it traces
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.wide("compile"))])
def test_a_compiled_product_gives_equal_gradients_in_one_graph(backend: str) -> None:
    layer = filled(Linear(I_, O_), Doubled())
    layer.casts = layer.product.cast(layer.weight.detach(), {})
    run = torch.compile(lambda x: layer(x).tanh(), backend=backend, fullgraph=True)
    results = []
    for call in (run, lambda x: layer(x).tanh()):
        x = drawn(B, S, I_).requires_grad_()
        layer.weight.grad = None
        call(x).sum().backward()
        results.append((x.grad, layer.weight.grad))
    torch.testing.assert_close(*results)


@pytest.mark.filterwarnings("ignore")  # torch's own, as it traces
@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_compiled_product_without_gradients_receives_its_buffers(count: int) -> None:
    """torch's compiler omits an argument of autograd functions for one number of arguments."""
    layer = filled(Linear(I_, O_), Doubled())
    hold(layer, slot_of(layer, "Linear.product"), {f"buffer{number}": torch.zeros(()) for number in range(count)})
    run = torch.compile(layer, backend="eager", fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(run(drawn(B, S, I_)), layer(drawn(B, S, I_)))


def test_an_mlp_calls_the_products_of_its_projections() -> None:
    mlp = MLP(I_, 4 * I_, "gelu", bias=True)
    for part in (mlp.up, mlp.down):
        filled(part)
    x, before = drawn(B, S, I_), mlp(drawn(B, S, I_))
    mlp.down.product = Doubled()
    bias = mlp.down.bias
    torch.testing.assert_close(mlp(x) - bias, 2 * (before - bias))


def test_the_suite_accepts_products_and_their_buffers(plant: Plant) -> None:
    plant("acme-product")
    from acme_product import Rounded

    (offer,) = Rounded(Rounded.Config()).offer()
    assert later_fault(offer, "Linear.product", torch.float32, "cpu", compiles=True) == ""
    assert BufferTrial(offer, "Linear.product", torch.float32, "cpu", "here").fault(compiles=False) == ""
    form = gathered_forms(offer)["Linear.product"]
    assert isinstance(form, GatheredForm)
    assert gathered_fault(offer, "Linear.product", form, torch.float64, "cpu") == ""
    assert (
        later_fault(Offer({"Experts.product": GroupedProduct()}), "Experts.product", torch.float32, "cpu", True) == ""
    )


@pytest.mark.parametrize("declared", [lambda x, y: (y, x[..., 1:]), lambda *both: both[1:]], ids=["shape", "number"])
def test_the_suite_reports_a_product_that_declares_other_operands_than_it_hands_out(declared: Any) -> None:
    class Misstated(Doubled):
        def operands(self, x: Tensor, weight: Operand, narrow: Narrow, buffers: Any) -> Any:
            return declared(x, x.new_empty(*x.shape[:-1], len(weight.values)))

    told = later_fault(Offer({"Linear.product": Misstated()}), "Linear.product", torch.float32, "cpu", False)
    assert told.startswith("`operands` declares other operands of `wgrad` than `dgrad` returns: ")


def test_the_suite_reports_a_product_that_cannot_be_postponed() -> None:
    class Different(Doubled):
        def backward(self, grad_y: Tensor, weight: Operand, saved: Any, sink: Any, *rest: Any) -> Any:
            grad_x, found = super().backward(grad_y, weight, saved, sink, *rest)
            sink.total.mul_(1.001)
            return grad_x, found

    offer = Offer({"Linear.product": Different()})
    found = later_fault(offer, "Linear.product", torch.float64, "cpu", compiles=False)
    assert found.startswith("the gradient of the weight has other bits if the weight's gradient is computed later")


WIDE = [
    *("zero2", "zero2 parallel.zero.stage=2", "pp2", f"tp2 {WHOLE_STREAM}", f"tp2 {COMPILED} {RECOMPUTED}"),
    *("fsdp2", f"fsdp2 {COMPILED}", f"fsdp2 {COMPILED} parallel.fsdp.gather=copies", "tp2pp2", "tp2cp2"),
    *(f"fsdp2tp2 {RECOMPUTED}", "dp2 trainer.micro_batch_size=1"),
]


@pytest.mark.parametrize("layout", layouts(["tp2", "fsdp2 parallel.fsdp.gather=copies"], WIDE))
def test_a_run_equals_that_of_one_process(plant: Plant, layout: str) -> None:
    plant("acme-product")
    ranks, settings = under(SETTINGS, layout)
    assert difference(run_workers(ranks, steps, settings), reference()) == ""


def steps(settings: Settings) -> Any:
    warnings.simplefilter("ignore")  # torch's own, as it traces
    return train_steps(settings)


@cache
def reference() -> Any:
    return run_workers(1, train_steps, SETTINGS)[0]


def test_the_rounding_reaches_the_results(plant: Plant) -> None:
    plant("acme-product")
    plain = run_workers(1, train_steps, {"model.num_layers": 2})[0]
    assert all(abs(a - b) > 1e-7 for a, b in zip(plain.losses, reference().losses, strict=True))


def test_a_copy_is_made_once_for_each_version_of_the_weights() -> None:
    run = tiny_run({"model.num_layers": 1, "trainer.compile": "never"})
    model = build_model(run)
    product, block = Doubled(), model.module.get_submodule("blocks.0")
    linear = block.attn.qkv.to_empty(device="cpu")
    linear.product = product
    block.forward = lambda: linear.casts[0].clone()
    keep_casts(model)
    found = []
    for value in (1.0, 1.0, 3.0):
        with torch.no_grad():
            linear.weight.fill_(value)
        if not found or found[-1] != 2 * value:
            model.weights_written()
        found.append(float(block().mean()))
    assert found == [2.0, 2.0, 6.0]
    assert product.num_casts == 2


def test_units_without_copies_are_called_directly() -> None:
    model = build_model(tiny_run({"model.num_layers": 1, "trainer.compile": "never"}))
    keep_casts(model)
    assert all("forward" not in vars(model.module.get_submodule(unit.name)) for unit in model.own_units)


def test_a_collective_without_a_boundary_is_refused(plant: Plant) -> None:
    plant(
        "acme-product",
        "        return [Offer(",
        "        return [Offer({'Linear.gather': lambda x: x}, lambda *_: True), Offer(",
    )
    with pytest.raises(UsageError, match="the collective states no boundary"):
        build_model(tiny_run(SETTINGS))
