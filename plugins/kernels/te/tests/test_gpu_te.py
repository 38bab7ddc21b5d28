"""Transformer Engine on a GPU: operands, products, attention and norms against fp64, with torch's own error beside.

N rows, I in, O out; B batch, S queries, H query heads, G KV heads, K head dim.
"""

from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from mplug_te.attention import core
from mplug_te.casts import BLOCK, cast, cast_blocks, scales_of, transposed
from mplug_te.linear import HalfProduct, product_of
from mplug_te.recipes import BLOCKWISE, DELAYED, TENSORWISE, Options
from torch import Tensor

from mplug.tensors.sink import Sink, Weights
from mplug_nn import AttentionInputs, AttentionSpec, Operand, Product
from mplug_nn.attention import scaled_dot_product
from mplug_nn.core import parts_of
from mplug_nn.product import WHOLE, Narrow, apply_product
from mplug_testing import KernelSuite, PrecisionSuite
from mplug_testing.attention_errors import Heads, attention_errors
from mplug_testing.capabilities import Setting, parts_fault

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA GPU here"),
    pytest.mark.skipif(find_spec("transformer_engine") is None, reason="Transformer Engine is not installed"),
    pytest.mark.filterwarnings("ignore"),  # those of Transformer Engine and of torch's compiler
]
OPTIONS = {
    TENSORWISE: Options(),
    DELAYED: Options(),
    BLOCKWISE: Options(gradient="float8_e4m3fn", power_of_two=True),
}
PRODUCTS: dict[str, Product] = {name: product_of(name, options) for name, options in OPTIONS.items()}
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
    without_effect = {"history": "it counts steps, and the tiny run has two (test_linear.py looks at more)"}


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
    product: Product,
    name: str,
    x: Tensor,
    weight: Tensor,
    grad: Tensor,
    sink: Tensor | None,
    buffers: dict[str, Tensor] | None = None,
) -> list[Tensor]:
    """The output, the gradient of the input, and that of the weight."""
    given = buffers_of(name, x, grad) if buffers is None else buffers
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    stale = None if sink is None else torch.ones((), dtype=torch.bool)
    y = apply_product(product, x, Weights(weight, sink, stale), WHOLE, given)
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


class _Bf16(Product):
    """torch's own products."""

    def forward(self, x: Tensor, weight: Any, narrow: Narrow, buffers: Any) -> tuple[Tensor, tuple[Tensor, ...]]:
        return x @ weight.values.t(), (x,)

    def dgrad(self, grad_y: Tensor, weight: Any, saved: Any, *_: Any) -> tuple[Tensor, tuple[Tensor, ...]]:
        return grad_y @ weight.values, (grad_y, *saved)

    def wgrad(self, operands: Any, sink: Sink | None, *_: Any) -> Tensor | None:
        found = operands[0].flatten(0, -2).t() @ operands[1].flatten(0, -2)
        if sink is None:
            return found  # type: ignore[no-any-return]
        sink.total.copy_(found)
        return None


BF16 = _Bf16()


ROUNDING = {TENSORWISE: (0.04, 0.07, 0.07), DELAYED: (0.04, 0.07, 0.07), BLOCKWISE: (0.04, 0.04, 0.04)}
"""Relative errors of y, grad_x and grad_w for normal numbers: E4M3 rounds each by about 2.6%, E5M2 by 5.2%."""


@pytest.mark.parametrize("with_sink", [None, torch.float32, torch.bfloat16], ids=["grad", "fp32 sink", "bf16 sink"])
@pytest.mark.parametrize("shape", [(2, 256, 512, 384), (1, 37, 256, 128), (4, 128, 2048, 1024)], ids=str)
@pytest.mark.parametrize("name", PRODUCTS)
def test_fp8_products_are_within_their_rounding_of_fp64(
    name: str, shape: tuple[int, int, int, int], with_sink: torch.dtype | None, record_property: Any
) -> None:
    b, s, i, o = shape
    x, weight, grad = drawn(b, s, i), drawn(o, i, seed=1, scale=0.02), drawn(b, s, o, seed=2, scale=1e-3)
    sink = None if with_sink is None else torch.full((o, i), 9.0, device="cuda", dtype=with_sink)
    found, right = results(PRODUCTS[name], name, x, weight, grad, sink), exact(x, weight, grad)
    plain = results(BF16, "", x, weight, grad, None)
    for what, ours, usual, expected, bound in zip(("y", "dx", "dw"), found, plain, right, ROUNDING[name], strict=True):
        record_property(what, f"{error(ours, expected):.2e}, torch in bf16 {error(usual, expected):.2e}")
        assert error(usual, expected) < error(ours, expected) < bound


@pytest.mark.parametrize("name", PRODUCTS)
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
    sink = torch.zeros(384, 512, device="cuda")
    given = buffers if name == DELAYED else {}
    found, right = results(product, name, x, weight, grad, sink, given), exact(x, weight, grad)
    for ours, expected, bound in zip(found, right, (4e-3, 4e-3, 1e-5), strict=True):  # y and dx are rounded to bf16
        assert error(ours, expected) < bound


def test_products_in_bf16_are_as_precise_as_torchs() -> None:
    x, weight, grad = drawn(2, 200, 512), drawn(384, 512, seed=1), drawn(2, 200, 384, seed=2)
    for sink in (None, torch.zeros(384, 512, device="cuda")):
        found, right = results(HalfProduct(), "", x, weight, grad, sink), exact(x, weight, grad)
        plain = results(BF16, "", x, weight, grad, None if sink is None else sink.clone())
        for ours, usual, expected in zip(found, plain, right, strict=True):
            assert error(ours, expected) <= 1.1 * error(usual, expected)


@pytest.mark.parametrize("name", [*PRODUCTS, "half"])
def test_a_unit_that_inductor_compiles_has_one_graph_and_the_same_bits(name: str) -> None:
    product = PRODUCTS.get(name, HalfProduct())
    x, weight, grad = drawn(2, 128, 256), drawn(384, 256, seed=1, scale=0.1), drawn(2, 128, 384, seed=2)
    buffers = buffers_of(name, x, grad)

    def unit(x: Tensor, weights: Weights, buffers: dict[str, Tensor]) -> Tensor:
        return apply_product(product, x, weights, WHOLE, buffers)

    torch.compiler.reset()
    outcomes = []
    for call in (unit, torch.compile(unit, fullgraph=True, dynamic=False)):
        leaf, sink = x.clone().requires_grad_(), torch.full((384, 256), 5.0, device="cuda")
        stale = torch.ones((), dtype=torch.bool)
        y = call(
            leaf, Weights(weight.clone().requires_grad_(), sink, stale), {k: v.clone() for k, v in buffers.items()}
        )
        y.backward(grad)
        outcomes.append((y.detach(), leaf.grad, sink))
    assert all(map(torch.equal, *outcomes))


@pytest.mark.parametrize("name", [*PRODUCTS, "half"])
def test_a_weight_gradient_that_is_deferred_has_the_same_bits(name: str) -> None:
    product = PRODUCTS.get(name, HalfProduct())
    x, weight, grad = drawn(2, 128, 256), drawn(384, 256, seed=1, scale=0.1), drawn(2, 128, 384, seed=2)
    now = results(product, name, x, weight, grad, torch.zeros(384, 256, device="cuda"))
    buffers, total = buffers_of(name, x, grad), torch.zeros(384, 256, device="cuda")
    operand = Operand(weight, product.cast(weight, buffers))
    _, saved = product.forward(x, operand, WHOLE, buffers)
    grad_x, operands = product.dgrad(grad, operand, saved, WHOLE, buffers, True)
    if name != "half":  # whose operands are the tensors themselves
        x.zero_()
        grad.zero_()
    product.wgrad(operands, Sink(total, torch.ones((), dtype=torch.bool)), WHOLE, buffers)
    assert grad_x is not None
    assert torch.equal(grad_x, now[1])
    assert torch.equal(total, now[2])


# Attention.

B, S, H, G, K = 2, 384, 8, 2, 64
LENGTHS = ((200, 1, 183, 0), (384, 0, 0, 0))
SPECS: dict[str, dict[str, Any]] = {
    "causal": {},
    "full": {"causal": False},
    "window": {"window": 100},
    "documents": {"documents": True},
    "documents, full": {"documents": True, "causal": False},
    "documents, window": {"documents": True, "window": 50},
    "sinks": {"sinks": True},
    "sinks, window": {"sinks": True, "window": 100},
    "narrower values": {"value_width": 32},
    "more keys": {"own_key_length": True},
    "more keys, full": {"own_key_length": True, "causal": False},
}


def inputs_of(spec: AttentionSpec, width: int = K) -> tuple[list[Tensor], dict[str, Any]]:
    """(q, k, v, then sinks if the specification has them; the remaining inputs by name)."""
    more = 128 if spec.own_key_length else 0
    shapes = [(B, S, H, width), (B, S + more, G, width), (B, S + more, G, spec.value_width)]
    shapes += [(H,)] if spec.sinks else []
    leaves = [drawn(*shape, seed=seed).requires_grad_() for seed, shape in enumerate(shapes)]
    lengths = torch.tensor(LENGTHS, device="cuda") if spec.documents else None
    return leaves, {"document_lengths": lengths, "num_heads": H}


def outcome(attend: Any, spec: AttentionSpec, leaves: list[Tensor], named: dict[str, Any]) -> list[Tensor]:
    """The output and the gradients of all leaves."""
    sinks = leaves[3] if spec.sinks else None
    output = attend(*leaves[:3], spec, AttentionInputs(sinks=sinks, **named))
    gradient = drawn(*output.shape, seed=9).to(output.dtype)
    return [output.detach(), *torch.autograd.grad(output, leaves, gradient)]


@pytest.mark.parametrize("deterministic", [False, True], ids=["", "deterministic"])
@pytest.mark.parametrize("asked", SPECS)
def test_each_specification_is_within_the_band_of_the_composition_in_fp64(asked: str, deterministic: bool) -> None:
    if deterministic and "sinks" in asked:
        pytest.skip("cuDNN has no deterministic backward of sinks, and `supports` refuses it")
    spec = AttentionSpec(**{"scale": K**-0.5, "key_width": K, "value_width": K, **SPECS[asked]})
    leaves, named = inputs_of(spec)
    wide = [x.detach().double().requires_grad_() for x in leaves]
    right = outcome(scaled_dot_product, spec, wide, named)
    found, plain = (outcome(one, spec, leaves, named) for one in (core(deterministic), scaled_dot_product))
    for name, ours, usual, expected in zip(("output", "dq", "dk", "dv", "dsinks"), found, plain, right, strict=False):
        off, allowed = error(ours, expected), max(2 * error(usual, expected), 2**-7)
        assert off <= allowed, f"{name} is off by {off:.2e}; plain torch by {error(usual, expected):.2e}"
    if deterministic:
        assert all(map(torch.equal, found, outcome(core(True), spec, leaves, named)))


@pytest.mark.parametrize("heads", [Heads(2, 512, 8, 8, 128), Heads(3, 131, 6, 2, 128), Heads(1, 1000, 4, 1, 64)])
def test_views_of_a_packed_projection_are_within_the_bf16_band(heads: Heads) -> None:
    for name, (off, usual) in attention_errors(core(False), heads, "cuda").items():
        assert off <= min(1e-2, 2 * usual), f"{name} is off by {off:.2e}; plain torch in bf16 by {usual:.2e}"


@pytest.mark.parametrize("heads", [(8, 8, 64), (8, 2, 128)], ids=["64 wide", "grouped"])
def test_parts_are_those_of_the_composition_in_fp64(heads: tuple[int, int, int]) -> None:
    assert parts_fault(parts_of(core(False)), Setting(*heads, torch.bfloat16, "cuda"), packed=False) == ""
