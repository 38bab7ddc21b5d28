"""The products around Transformer Engine's functions: gradients, sinks, collectives, statistics, tracing.

On a CPU, stand-ins in plain torch take the functions' place. n rows of a rank, I in, O out.
"""

from collections.abc import Mapping
from typing import Any, ClassVar
from warnings import catch_warnings

import pytest
import torch
from engine_in_torch import engine
from mplug_te.linear import HalfProduct, product_of
from mplug_te.recipes import BLOCKWISE, DELAYED, GRADIENT, INPUT, TENSORWISE, Options, recipe_of
from prologues import drawn, error
from torch import Tensor

from mplug import Offer, Run
from mplug.tensors.sink import Weights
from mplug_compile.tracer import prepare_compiler
from mplug_nn import Boundary, DelayedScaling, Product
from mplug_nn.product import Narrow, apply_product
from mplug_testing import KernelSuite, kernel_cases

__all__ = ["engine"]
B, S, I_, O_ = 2, 32, 128, 256
OPTIONS = {
    TENSORWISE: Options(),
    DELAYED: Options(),
    BLOCKWISE: Options(gradient="float8_e4m3fn", power_of_two=True),
}
PRODUCTS: dict[str, Product] = {"half": HalfProduct()} | {name: product_of(name, OPTIONS[name]) for name in OPTIONS}
ERROR = {"half": 0.01, TENSORWISE: 0.08, DELAYED: 0.1, BLOCKWISE: 0.05}
"""Largest ‖found - exact‖ / ‖exact‖. E5M2 keeps 2 bits, so its rounding error is up to 1/8 of a number."""
each = pytest.mark.parametrize("name", PRODUCTS)


@pytest.mark.wide(
    "precision", tests=["test_weight_gradients_can_be_computed_later", "test_its_buffers_are_what_it_declares"]
)
class TestDelayedProducts(KernelSuite):
    plugin = "te"
    dtypes = ("te-fp8",)
    error_factor = 64.0  # fp8 numbers have four or five bits of significand less than those of bf16
    settings: ClassVar[dict[str, Any]] = {
        "trainer.base_modules": ["head"],
        "precisions.te-fp8.recipe": "delayed",
        "model.activation": "swiglu",
        **dict.fromkeys(("kernels.experts", "kernels.norm_product", "kernels.activation_product"), "te"),
    }

    @classmethod
    def naming(cls) -> dict[str, Any]:
        return {"trainer.precision": cls.dtypes[0], "kernels.linear": "te"}

    @pytest.fixture(autouse=True)
    def without_sinks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A sink in fp32 has no rounding to compare with; the tests below check it."""
        cases = [case for case in kernel_cases.cases() if "sink" not in case.name]
        monkeypatch.setattr(kernel_cases, "cases", lambda: cases)

    def _offered(self, dtype: str | None = None) -> tuple[Run, list[Offer]]:
        run, offers = super()._offered(dtype)
        return run, [one for one in offers if all(slot.endswith("product") for slot in one.suppliers)]


@pytest.mark.wide(
    "precision", tests=["test_weight_gradients_can_be_computed_later", "test_its_buffers_are_what_it_declares"]
)
class TestTensorwiseProducts(TestDelayedProducts):
    settings: ClassVar[dict[str, Any]] = {
        "trainer.base_modules": ["head"],
        "precisions.te-fp8.recipe": "tensorwise",
        "kernels.experts": "te",
    }


class TestHalfProducts(TestDelayedProducts):
    dtypes = ("bf16",)
    error_factor = 4.0
    settings: ClassVar[dict[str, Any]] = {}


def results(
    name: str,
    x: Tensor,
    weight: Tensor,
    grad: Tensor,
    narrow: Narrow = Narrow(),  # noqa: B008 (it is immutable)
    sink: tuple[Tensor, Tensor] | None = None,
    buffers: Mapping[str, Tensor] | None = None,
    call: Any = apply_product,
) -> list[Tensor]:
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    own = buffers_of(name) if buffers is None else buffers
    y = call(PRODUCTS[name], x, Weights(weight, *(sink or (None, None))), narrow, own)
    y.backward(grad)
    return [y.detach(), x.grad, weight.grad if sink is None else sink[0]]


def buffers_of(name: str) -> dict[str, Tensor]:
    scales = {"input_scale": torch.full((1,), 16.0), "gradient_scale": torch.full((1,), 256.0)}
    return {INPUT: torch.zeros(()), GRADIENT: torch.zeros(()), **scales} if name == DELAYED else {}


def exact(x: Tensor, weight: Tensor, grad: Tensor) -> list[Tensor]:
    x, weight, grad = x.double(), weight.double(), grad.double()
    return [x @ weight.t(), grad @ weight, grad.flatten(0, -2).t() @ x.flatten(0, -2)]


def assert_near(name: str, found: list[Tensor], expected: list[Tensor]) -> None:
    for one, right in zip(found, expected, strict=True):
        assert one.shape == right.shape
        assert error(one, right) < ERROR[name]


@pytest.mark.parametrize("rows", [(B, S), (3, 7), (40,)], ids=str)
@each
def test_values_and_gradients_are_those_of_exact_products(name: str, rows: tuple[int, ...]) -> None:
    given = drawn(*rows, I_), drawn(O_, I_, seed=1, scale=0.1), drawn(*rows, O_, seed=2, scale=1e-3)
    assert_near(name, results(name, *given), exact(*given))


@each
def test_a_sink_is_overwritten_if_it_is_stale_and_added_to_otherwise(name: str) -> None:
    given = drawn(B, S, I_), drawn(O_, I_, seed=1), drawn(B, S, O_, seed=2)
    sink, (y, grad_x, grad_weight) = (torch.full((O_, I_), 7.0), torch.ones((), dtype=torch.bool)), exact(*given)
    for number in (1, 2):
        assert_near(name, results(name, *given, sink=sink), [y, grad_x, number * grad_weight])
        assert not bool(sink[1])


@each
def test_the_collectives_of_a_boundary_give_the_products_of_the_whole(name: str) -> None:
    """Two equal ranks: each has the same half of the sequence."""
    boundary = Boundary(lambda x: torch.cat((x, x), 1), lambda y: y[:, :S] + y[:, S:], lambda x: x)
    x, weight = drawn(B, S, I_), drawn(O_, I_, seed=1, scale=0.1)
    grad, whole_x = drawn(B, 2 * S, O_, seed=2), torch.cat((x, x), 1)
    whole = exact(whole_x, weight, grad)
    assert_near(
        name,
        results(name, x, weight, grad, Narrow(before=boundary)),
        [whole[0], boundary.summed(whole[1]), whole[2]],
    )
    part = drawn(B, S, O_, seed=2)
    whole = exact(whole_x, weight, torch.cat((part, part), 1))
    row = results(name, whole_x, weight, part, Narrow(after=boundary))
    assert_near(name, row, [boundary.summed(whole[0]), *whole[1:]])


@pytest.mark.parametrize("name", [TENSORWISE, DELAYED])
def test_fp8_numbers_travel_between_ranks_and_a_gathered_input_is_not_kept(name: str) -> None:
    travelled: list[tuple[torch.dtype, int]] = []
    kept: list[tuple[int, ...]] = []

    def whole(part: Tensor) -> Tensor:
        travelled.append((part.dtype, part.shape[1]))
        return torch.cat((part, part), 1)

    boundary = Boundary(whole, lambda y: y[:, :S], lambda x: x)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(tuple(x.shape)) or x, lambda x: x):
        results(name, drawn(B, S, I_), drawn(O_, I_), drawn(B, 2 * S, O_), Narrow(before=boundary))
    assert travelled == [(torch.uint8, S)] * 2
    assert kept == [(O_, I_), (B, S, I_), (1,)]


def test_a_blockwise_product_traces_into_one_graph_and_the_results_are_the_same() -> None:
    """The suite's cases are too narrow for it."""
    prepare_compiler()
    torch.compiler.reset()
    found = []
    for call in (apply_product, torch.compile(apply_product, backend="aot_eager", fullgraph=True)):
        sink = torch.zeros(O_, I_), torch.ones((), dtype=torch.bool)
        given = drawn(B, S, I_), drawn(O_, I_, seed=1), drawn(B, S, O_, seed=2)
        with catch_warnings(action="ignore"):  # torch's own, as it traces
            found.append(results(BLOCKWISE, *given, sink=sink, call=call))
    torch.compiler.reset()
    assert all(map(torch.equal, *found))


def test_copies_of_a_weight_are_read_instead_of_the_weight() -> None:
    x, weight = drawn(B, S, I_), drawn(O_, I_, seed=1)
    for name in OPTIONS:
        casts = PRODUCTS[name].cast(weight, {})
        y = apply_product(PRODUCTS[name], x, Weights(torch.zeros_like(weight)), Narrow(), buffers_of(name), casts)
        assert error(y, exact(x, weight, drawn(B, S, O_))[0]) < ERROR[name]


def test_a_step_keeps_the_largest_absolute_values_and_uses_the_scales_of_the_states() -> None:
    buffers, x, grad = buffers_of(DELAYED), drawn(B, S, I_), drawn(B, S, O_, seed=2)
    weight = drawn(O_, I_, seed=1)
    first = results(DELAYED, x, weight, grad, buffers=buffers)
    assert float(buffers[INPUT]) == float(x.abs().max())
    assert float(buffers[GRADIENT]) == float(grad.abs().max())
    buffers[DelayedScaling.scale_name(INPUT)].fill_(1e4)  # so large that all values are cut off
    assert error(results(DELAYED, x, weight, grad, buffers=buffers)[0], first[0]) > 0.5


def test_recipes_are_data_with_the_formats_of_their_operands() -> None:
    formats = {"forward": "float8_e4m3fn", "gradient": "float8_e5m2", "power_of_two": False}
    assert recipe_of("delayed", None, 5, 2).options == {**formats, "history": 5, "margin": 2}
    assert recipe_of("tensorwise", True, 5, 2).options["power_of_two"]
    assert recipe_of("blockwise", None, 5, 2).options["gradient"] == "float8_e4m3fn"
    assert recipe_of("mxfp8", None, 5, 2).name == "mxfp8"
