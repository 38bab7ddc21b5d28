"""The products around Transformer Engine's functions: gradients, sinks, collectives, histories, tracing.

On a CPU, stand-ins in plain torch take the functions' place. n rows of a rank, I in, O out.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any
from warnings import catch_warnings

import pytest
import torch
import yaml
from engine_in_torch import stand_ins
from mplug_te.linear import HalfProduct, product_of
from mplug_te.recipes import (
    BLOCKWISE,
    DELAYED,
    GRADIENT,
    INPUT,
    TENSORWISE,
    Options,
    delayed_scaling_of,
    recipe_of,
)
from torch import Tensor

from mplug import Offer, Site
from mplug.layout.plan import Init, Parameter
from mplug.model.compiled.tracer import prepare_compiler
from mplug.tensors.sink import Weights
from mplug_nn import Boundary, DelayedScaling, Linear, Product
from mplug_nn.product import Narrow, apply_product
from mplug_testing import run_workers
from mplug_testing.delayed_gradient_checks import later_fault
from mplug_testing.harness import difference, train_steps
from mplug_testing.kernel_buffer_checks import BufferTrial

B, S, I_, O_ = 2, 32, 128, 256
OPTIONS = {
    TENSORWISE: Options(),
    DELAYED: Options(history=3),
    BLOCKWISE: Options(gradient="float8_e4m3fn", power_of_two=True),
}
PRODUCTS: dict[str, Product] = {"half": HalfProduct()} | {name: product_of(name, OPTIONS[name]) for name in OPTIONS}
ERROR = {"half": 0.01, TENSORWISE: 0.08, DELAYED: 0.1, BLOCKWISE: 0.05}
"""Largest ‖found - exact‖ / ‖exact‖. E5M2 keeps 2 bits, so its rounding error is up to 1/8 of a number."""


@pytest.fixture(autouse=True)
def engine() -> Iterator[None]:
    """Transformer Engine's functions in plain torch."""
    with stand_ins():
        yield


def drawn(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return (scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).bfloat16()


def site() -> Site:
    with torch.device("meta"):
        layer = Linear(I_, O_, bias=False)
    weight = Parameter(("mlp", "embed"), Init("normal"))
    return Site("blocks.*.part", "Linear.product", layer, "blocks.0.part", parameters={"weight": weight})


def buffers_of(name: str) -> dict[str, Tensor]:
    if name != DELAYED:
        return {}
    return {
        key: torch.full(one.shape, one.value) for key, one in delayed_scaling_of(OPTIONS[name]).buffers(site()).items()
    }


def results(
    name: str,
    x: Tensor,
    weight: Tensor,
    grad: Tensor,
    narrow: Narrow = Narrow(),  # noqa: B008 (it is immutable)
    sink: Tensor | None = None,
    buffers: Mapping[str, Tensor] | None = None,
    call: Any = apply_product,
) -> list[Tensor]:
    """The output, the gradient of the input, and that of the weight (or its sink)."""
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    stale = None if sink is None else torch.ones((), dtype=torch.bool)
    own = buffers_of(name) if buffers is None else buffers
    y = call(PRODUCTS[name], x, Weights(weight, sink, stale), narrow, own)
    y.backward(grad)
    assert x.grad is not None
    of_weight = weight.grad if sink is None else sink
    assert of_weight is not None
    return [y.detach(), x.grad, of_weight]


def exact(x: Tensor, weight: Tensor, grad: Tensor) -> list[Tensor]:
    x, weight, grad = x.double(), weight.double(), grad.double()
    return [x @ weight.t(), grad @ weight, grad.flatten(0, -2).t() @ x.flatten(0, -2)]


def error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("rows", [(B, S), (3, 7), (40,)], ids=str)
@pytest.mark.parametrize("name", PRODUCTS)
def test_values_and_gradients_are_those_of_exact_products(name: str, rows: tuple[int, ...]) -> None:
    x, weight, grad = drawn(*rows, I_), drawn(O_, I_, seed=1, scale=0.1), drawn(*rows, O_, seed=2, scale=1e-3)
    sink = torch.full((O_, I_), 9.0)
    for found in (results(name, x, weight, grad), results(name, x, weight, grad, sink=sink)):
        for one, expected in zip(found, exact(x, weight, grad), strict=True):
            assert one.shape == expected.shape
            assert error(one, expected) < ERROR[name]


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_sink_is_overwritten_if_it_is_stale_and_added_to_otherwise(name: str) -> None:
    x, weight, grad = drawn(B, S, I_), drawn(O_, I_, seed=1), drawn(B, S, O_, seed=2)
    sink, stale = torch.full((O_, I_), 7.0), torch.ones((), dtype=torch.bool)
    for number in (1, 2):
        y = apply_product(PRODUCTS[name], x, Weights(weight.requires_grad_(), sink, stale), Narrow(), buffers_of(name))
        y.backward(grad)
        assert error(sink, number * exact(x, weight.detach(), grad)[2]) < ERROR[name]
        assert not bool(stale)
    assert weight.grad is None


@pytest.mark.parametrize("name", PRODUCTS)
def test_the_collectives_of_a_boundary_give_the_products_of_the_whole(name: str) -> None:
    """Two equal ranks: each has the same half of the sequence."""
    boundary = Boundary(lambda x: torch.cat((x, x), 1), lambda y: y[:, :S] + y[:, S:], lambda x: x)
    x, weight = drawn(B, S, I_), drawn(O_, I_, seed=1, scale=0.1)
    grad, part = drawn(B, 2 * S, O_, seed=2), drawn(B, S, O_, seed=2)
    column = results(name, x, weight, grad, Narrow(before=boundary))
    whole = exact(torch.cat((x, x), 1), weight, grad)
    row = results(name, torch.cat((x, x), 1), weight, part, Narrow(after=boundary))
    of_row = exact(torch.cat((x, x), 1), weight, torch.cat((part, part), 1))
    for found, expected in (
        (column[0], whole[0]),
        (column[1], boundary.summed(whole[1])),
        (column[2], whole[2]),
        (row[0], boundary.summed(of_row[0])),
        *zip(row[1:], of_row[1:], strict=True),
    ):
        assert found.shape == expected.shape
        assert error(found, expected) < ERROR[name]


@pytest.mark.parametrize("name", [TENSORWISE, DELAYED])
def test_fp8_numbers_travel_between_ranks_and_a_gathered_input_is_not_kept(name: str) -> None:
    travelled: list[tuple[torch.dtype, int]] = []

    def whole(part: Tensor) -> Tensor:
        travelled.append((part.dtype, part.shape[1]))
        return torch.cat((part, part), 1)

    boundary, kept = Boundary(whole, lambda y: y[:, :S], lambda x: x), []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        results(name, drawn(B, S, I_), drawn(O_, I_), drawn(B, 2 * S, O_), Narrow(before=boundary))
    assert travelled == [(torch.uint8, S)] * 2
    assert kept == [(O_, I_), (B, S, I_), (1,)]


@pytest.mark.parametrize("name", PRODUCTS)
def test_it_traces_into_one_graph_and_the_results_are_the_same(name: str) -> None:
    x, weight, grad = drawn(B, S, I_), drawn(O_, I_, seed=1), drawn(B, S, O_, seed=2)
    prepare_compiler()
    torch.compiler.reset()
    sinks = [torch.zeros(O_, I_) for _ in range(2)]
    compiled = torch.compile(apply_product, backend="aot_eager", fullgraph=True)
    with catch_warnings(action="ignore"):  # torch's own, as it traces
        found = results(name, x, weight, grad, sink=sinks[0], call=compiled)
    torch.compiler.reset()
    for one, other in zip(found, results(name, x, weight, grad, sink=sinks[1]), strict=True):
        assert torch.equal(one, other)


def test_copies_of_a_weight_are_read_instead_of_the_weight() -> None:
    x, weight = drawn(B, S, I_), drawn(O_, I_, seed=1)
    for name in OPTIONS:
        casts = PRODUCTS[name].cast(weight, {})
        y = apply_product(PRODUCTS[name], x, Weights(torch.zeros_like(weight)), Narrow(), buffers_of(name), casts)
        assert error(y, exact(x, weight, drawn(B, S, O_))[0]) < ERROR[name]


# Delayed scaling.


def test_a_step_keeps_the_largest_absolute_values_and_uses_the_scales_of_the_states() -> None:
    buffers, x, grad = buffers_of(DELAYED), drawn(B, S, I_), drawn(B, S, O_, seed=2)
    weight = drawn(O_, I_, seed=1)
    first = results(DELAYED, x, weight, grad, buffers=buffers)
    assert float(buffers[INPUT]) == float(x.abs().max())
    assert float(buffers[GRADIENT]) == float(grad.abs().max())
    buffers[DelayedScaling.scale_name(INPUT)].fill_(1e4)  # so large that all values are cut off
    assert error(results(DELAYED, x, weight, grad, buffers=buffers)[0], first[0].double()) > 0.5


def test_recipes_are_data_with_the_formats_of_their_operands() -> None:
    assert recipe_of("delayed", None, 5, 2).options == {
        "forward": "float8_e4m3fn",
        "gradient": "float8_e5m2",
        "power_of_two": False,
        "history": 5,
        "margin": 2,
    }
    assert recipe_of("tensorwise", True, 5, 2).options["power_of_two"]
    assert recipe_of("blockwise", None, 5, 2).options["gradient"] == "float8_e4m3fn"
    assert recipe_of("mxfp8", None, 5, 2).name == "mxfp8"


# The checks of the suite for kernels.


@pytest.mark.parametrize("name", ["half", TENSORWISE, DELAYED])
def test_the_weight_gradient_can_be_computed_later(name: str) -> None:
    offer = Offer({"Linear.product": PRODUCTS[name]})
    if name == DELAYED:
        offer = replace(offer, buffers=delayed_scaling_of(OPTIONS[DELAYED]).buffers)
    assert later_fault(offer, "Linear.product", torch.bfloat16, "cpu", compiles=True) == ""


def test_the_statistics_of_parts_combine_to_those_of_the_whole() -> None:
    options = replace(OPTIONS[DELAYED], power_of_two=True)
    offer = Offer(
        {"Linear.product": product_of(DELAYED, options)},
        buffers=delayed_scaling_of(options).buffers,
        step_ended=delayed_scaling_of(options).step_ended,
    )
    assert BufferTrial(offer, "Linear.product", torch.bfloat16, "cpu", "delayed").fault(compiles=True) == ""


# Whole runs.

RUN: dict[str, Any] = {"trainer.precision": "te-fp8", "kernels.linear": "te"}
RECIPES = ("delayed", "tensorwise")
"""Blockwise scaling needs widths of 128."""
SAME, ROUNDED = 1e-5, 0.4
BANDS = {
    "dp2": SAME,
    "zero2": SAME,
    "zero2 parallel.zero.stage=2": SAME,
    "fsdp2": ROUNDED,
    "pp2": SAME,
    "tp2": ROUNDED,
    "tp2 parallel.tp.sequence_parallel=false": ROUNDED,
    "tp2 trainer.compile=aot_eager memory.recompute.mode=full": ROUNDED,
}
"""Maximum relative errors of gradients under a layout.

Layouts that divide no product and sum in fp32 differ only by the order of sums. Tensor parallelism and fsdp round other
bf16 numbers; then some fp8 numbers differ by a step, which is up to an eighth of them.
"""


def steps(settings: dict[str, Any]) -> Any:
    """Be one rank of a run, with stand-ins."""
    with stand_ins(), catch_warnings(action="ignore"):  # torch's own, as it traces
        return train_steps(settings)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_run_in_fp8_stays_near_one_in_bf16_and_differs_from_it(recipe: str) -> None:
    found = steps({**RUN, "precisions.te-fp8.recipe": recipe, "trainer.base_modules": ["head"]})
    plain = train_steps({"trainer.precision": "bf16"})
    assert found.losses == pytest.approx(plain.losses, rel=0.02)
    assert found.norms == pytest.approx(plain.norms, rel=0.1)
    assert found.losses != plain.losses


@pytest.mark.wide("precision")
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("layout", BANDS)
def test_a_layout_is_within_its_band_of_one_process(recipe: str, layout: str) -> None:
    word, *more = layout.split()
    changes = {name: yaml.safe_load(value) for name, _, value in (one.partition("=") for one in more)}
    settings = {**RUN, "precisions.te-fp8.recipe": recipe}
    found, alone = run_workers(2, steps, {**settings, **changes, "parallel.layout": word}), steps(settings)
    assert difference(found, alone, BANDS[layout]) == ""
    assert found[0].losses == pytest.approx(alone.losses, rel=1e-3)
    assert found[0].norms == pytest.approx(alone.norms, rel=2e-2)
