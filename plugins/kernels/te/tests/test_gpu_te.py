"""Transformer Engine on a GPU: operands, products and attention against fp64, with torch's own error beside.

N rows, I in, O out.
"""

from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from attention_bands import (
    SPECS,
    Heads,
    assert_within_band,
    assert_within_bf16_band_of_views,
    inputs_of,
    outcome,
    spec_of,
)
from mplug_te.attention import core
from mplug_te.casts import BLOCK, cast, cast_blocks, scales_of, transposed
from mplug_te.linear import HalfProduct, product_of
from mplug_te.recipes import BLOCKWISE, DELAYED, TENSORWISE, Options
from prologues import error
from torch import Tensor

from mplug.tensors.sink import Weights
from mplug_nn import Product
from mplug_nn.product import WHOLE, apply_product
from mplug_testing import KernelSuite, PrecisionSuite

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(find_spec("transformer_engine") is None, reason="Transformer Engine is not installed"),
    pytest.mark.filterwarnings("ignore"),  # those of Transformer Engine and of torch's compiler
]
OPTIONS = {
    TENSORWISE: Options(),
    DELAYED: Options(),
    BLOCKWISE: Options(gradient="float8_e4m3fn", power_of_two=True),
}
PRODUCTS: dict[str, Product] = {name: product_of(name, options) for name, options in OPTIONS.items()}
PRODUCTS["half"] = HalfProduct()
E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"
TINY = {"trainer.device": "cuda", "model.hidden_size": 128, "model.num_attention_heads": 2, "model.num_kv_heads": 1}


class TestTransformerEngine(KernelSuite):
    plugin = "te"
    settings = TINY
    dtypes = ("bf16",)
    deterministic = False  # cuDNN's backward


class TestDeterministicTransformerEngine(TestTransformerEngine):
    settings = {**TINY, "trainer.deterministic": True}
    deterministic = True


class TestDelayed(PrecisionSuite):
    plugin = "te-fp8"
    settings = {
        **TINY,
        "kernels.linear": "te",
        "trainer.base_modules": ["head"],
        "precisions.te-fp8.recipe": "delayed",
    }
    tolerance = 0.3  # E5M2 keeps 2 bits, and this run sums over few tokens
    without_effect = {
        "history": "it counts steps, and the tiny run has two (tests/test_delayed_scaling.py looks at five)"
    }


class TestTensorwise(TestDelayed):
    checks_fields = False
    settings = {**TestDelayed.settings, "precisions.te-fp8.recipe": "tensorwise"}


class TestBlockwise(TestDelayed):
    checks_fields = False
    settings = {**TestDelayed.settings, "precisions.te-fp8.recipe": "blockwise"}


def drawn(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return (scale * torch.randn(shape, device="cuda", generator=generator)).bfloat16()


# Operands.


def values_of(x: Tensor, scale: Tensor, format_name: str) -> Tensor:
    """x in a format, as bytes, by torch's own cast."""
    dtype = getattr(torch, format_name)
    end = float(torch.finfo(dtype).max)
    return (x.float() * scale).clamp(-end, end).to(dtype).view(torch.uint8)


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("format_name", [E4M3, E5M2])
@pytest.mark.parametrize("shape", [(64, 128), (37, 48), (1, 16)], ids=str)
def test_tensorwise_operands_are_bit_equal_to_their_definition(
    shape: tuple[int, int], format_name: str, power_of_two: bool
) -> None:
    x = drawn(*shape, scale=3.0)
    rows, columns, inverse, _ = cast(x, None, format_name, power_of_two, True)
    scale = scales_of(x.float().abs().amax().view(1), format_name, power_of_two)
    assert torch.equal(inverse, 1 / scale)
    assert torch.equal(rows, values_of(x, scale, format_name))
    padded = torch.zeros(-(-shape[0] // 16) * 16, shape[1], dtype=torch.uint8, device="cuda")
    padded[: shape[0]] = rows
    assert torch.equal(columns, padded.t())
    assert torch.equal(transposed(rows), padded.t())


def test_a_given_scale_cuts_off_larger_values_and_the_largest_value_is_reported() -> None:
    x, scale = drawn(48, 64), torch.full((1,), 300.0, device="cuda")
    rows, _, inverse, largest = cast(x, scale, E4M3, False, False)
    assert torch.equal(rows, values_of(x, scale, E4M3))
    assert torch.equal(inverse, 1 / scale)
    assert torch.equal(largest, x.float().abs().amax().view(1))


@pytest.mark.parametrize("rows", [256, 200])
def test_operands_in_blocks_are_bit_equal_to_their_definition(rows: int) -> None:
    x = drawn(rows, 640, scale=3.0)
    whole = torch.zeros(256, 640, device="cuda", dtype=x.dtype)
    whole[:rows] = x
    found = cast_blocks(x, False, E4M3, True, True, True)
    for values, inverses, expected in ((*found[:2], whole), (*found[2:], whole.t())):
        blocks = expected.float().reshape(len(expected), -1, BLOCK)
        scale = scales_of(blocks.abs().amax(dim=2), E4M3, True)
        assert torch.equal(values, values_of(blocks, scale[..., None], E4M3).reshape(expected.shape))
        assert torch.equal(inverses, (1 / scale).t())
    squares = cast_blocks(whole, True, E4M3, True, True, True)
    for values, inverses, expected in ((*squares[:2], whole), (*squares[2:], whole.t())):
        n, i = expected.shape
        blocks = expected.float().reshape(n // BLOCK, BLOCK, i // BLOCK, BLOCK)
        scale = scales_of(blocks.abs().amax(dim=(1, 3)), E4M3, True)
        assert torch.equal(values, values_of(blocks, scale[:, None, :, None], E4M3).reshape(n, i))
        assert torch.equal(inverses[:, : i // BLOCK], 1 / scale)


# Products.


def buffers_of(name: str, x: Tensor, grad: Tensor) -> dict[str, Tensor]:
    if name != DELAYED:
        return {}
    made = {operand: torch.zeros((), device="cuda") for operand in ("input", "gradient")}
    for operand, tensor, format_name in (("input", x, E4M3), ("gradient", grad, E5M2)):
        made[f"{operand}_scale"] = scales_of(tensor.float().abs().amax().view(1), format_name)
    return made


def results(
    name: str,
    x: Tensor,
    weight: Tensor,
    grad: Tensor,
    sink: Tensor | None,
    call: Any = apply_product,
    product: Product | None = None,
    buffers: dict[str, Tensor] | None = None,
) -> list[Tensor]:
    """The output, the gradient of the input, and that of the weight."""
    own = buffers_of(name, x, grad) if buffers is None else buffers
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    stale = None if sink is None else torch.ones((), dtype=torch.bool)
    y = call(product or PRODUCTS[name], x, Weights(weight, sink, stale), WHOLE, own)
    y.backward(grad)
    return [y.detach(), x.grad, weight.grad if sink is None else sink]


def by_torch(x: Tensor, weight: Tensor, grad: Tensor, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    x, weight, grad = x.to(dtype), weight.to(dtype), grad.to(dtype)
    return [x @ weight.t(), grad @ weight, grad.flatten(0, -2).t() @ x.flatten(0, -2)]


def exact(x: Tensor, weight: Tensor, grad: Tensor) -> list[Tensor]:
    return by_torch(x, weight, grad, torch.float64)


ROUNDING = {TENSORWISE: (0.04, 0.07, 0.07), DELAYED: (0.04, 0.07, 0.07), BLOCKWISE: (0.04, 0.04, 0.04)}
"""Relative errors of y, grad_x and grad_w for normal numbers: E4M3 rounds each by about 2.6%, E5M2 by 5.2%."""


@pytest.mark.parametrize("with_sink", [None, torch.float32, torch.bfloat16], ids=["grad", "fp32 sink", "bf16 sink"])
@pytest.mark.parametrize("shape", [(2, 256, 512, 384), (1, 37, 256, 128), (4, 128, 2048, 1024)], ids=str)
@pytest.mark.parametrize("name", OPTIONS)
def test_fp8_products_are_within_their_rounding_of_fp64(
    name: str, shape: tuple[int, int, int, int], with_sink: torch.dtype | None, record_property: Any
) -> None:
    b, s, i, o = shape
    x, weight, grad = drawn(b, s, i), drawn(o, i, seed=1, scale=0.02), drawn(b, s, o, seed=2, scale=1e-3)
    sink = None if with_sink is None else torch.full((o, i), 9.0, device="cuda", dtype=with_sink)
    found, right = results(name, x, weight, grad, sink), exact(x, weight, grad)
    plain = by_torch(x, weight, grad)
    for what, ours, usual, expected, bound in zip(("y", "dx", "dw"), found, plain, right, ROUNDING[name], strict=True):
        record_property(what, f"{error(ours, expected):.2e}, torch in bf16 {error(usual, expected):.2e}")
        assert error(usual, expected) < error(ours, expected) < bound


@pytest.mark.parametrize("name", OPTIONS)
def test_products_of_exact_operands_are_bounded_by_their_accumulation(name: str) -> None:
    """Small integers and scales of powers of two: fp8 represents the operands exactly, and only sums are rounded."""
    generator = torch.Generator("cuda").manual_seed(3)
    x, weight, grad = (
        torch.randint(-4, 5, shape, device="cuda", generator=generator).bfloat16()
        for shape in ((256, 512), (384, 512), (256, 384))
    )
    product = product_of(name, replace(OPTIONS[name], power_of_two=True))
    buffers = {key: torch.full((1,), 64.0, device="cuda") for key in ("input_scale", "gradient_scale")}
    buffers |= {key: torch.zeros((), device="cuda") for key in ("input", "gradient")}
    sink, own = torch.zeros(384, 512, device="cuda"), buffers if name == DELAYED else {}
    found = results(name, x, weight, grad, sink, product=product, buffers=own)
    right = exact(x, weight, grad)
    for ours, expected, bound in zip(found, right, (4e-3, 4e-3, 1e-5), strict=True):  # y and dx are rounded to bf16
        assert error(ours, expected) < bound


def test_products_in_bf16_are_as_precise_as_torchs() -> None:
    x, weight, grad = drawn(2, 200, 512), drawn(384, 512, seed=1), drawn(2, 200, 384, seed=2)
    for sink in (None, torch.zeros(384, 512, device="cuda")):
        found, right = results("half", x, weight, grad, sink), exact(x, weight, grad)
        for ours, usual, expected in zip(found, by_torch(x, weight, grad), right, strict=True):
            assert error(ours, expected) <= 1.1 * error(usual, expected)


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_unit_that_inductor_compiles_has_one_graph_and_the_same_bits(name: str) -> None:
    given = drawn(2, 128, 256), drawn(384, 256, seed=1, scale=0.1), drawn(2, 128, 384, seed=2)
    torch.compiler.reset()
    compiled = torch.compile(apply_product, fullgraph=True, dynamic=False)
    sinks = [torch.full((384, 256), 5.0, device="cuda") for _ in range(2)]
    calls = zip(sinks, (apply_product, compiled), strict=True)
    assert all(map(torch.equal, *(results(name, *given, sink, call) for sink, call in calls)))


# Attention.


@pytest.mark.parametrize("deterministic", [False, True], ids=["", "deterministic"])
@pytest.mark.parametrize(
    "asked",
    [*SPECS.values(), {"documents": True, "window": 50}, {"sinks": True, "window": 100}],
    ids=lambda asked: ", ".join(asked),
)
def test_each_specification_is_within_the_band_of_the_composition_in_fp64(
    asked: dict[str, Any], deterministic: bool
) -> None:
    if deterministic and "sinks" in asked:
        pytest.skip("cuDNN has no deterministic backward of sinks, and `supports` refuses it")
    spec = spec_of(**asked)
    given = inputs_of(spec, torch.bfloat16, 384, 128)
    assert_within_band(core(deterministic), spec, given, 2, 2**-7)
    if deterministic:
        assert all(map(torch.equal, *(outcome(core(True), spec, *given) for _ in range(2))))


@pytest.mark.parametrize("heads", [Heads(2, 512, 8, 8, 128), Heads(3, 131, 6, 2, 128), Heads(1, 1000, 4, 1, 64)])
def test_views_of_a_packed_projection_are_within_the_bf16_band(heads: Heads) -> None:
    assert_within_bf16_band_of_views(core(False), heads)
