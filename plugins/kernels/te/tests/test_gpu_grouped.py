"""Experts and fused activations on a GPU: operands, bf16 products, and compiled units.

`tests/test_gpu_te_and_fp8.py` compares their FP8 products with another supplier and with fp64. M rows, I in, O out.
"""

from importlib.util import find_spec
from typing import Any

import pytest
import torch
from mplug_te.activations import FUNCTIONS, GATED, ActivationProduct, quantised_activation
from mplug_te.casts import ALIGNED, BLOCK, cast, cast_blocks
from mplug_te.grouped import groups_by
from mplug_te.groups import (
    blocks_of,
    cast_expert_blocks,
    cast_experts,
    cast_group_blocks,
    cast_groups,
    groups_of,
    lines_of,
    part_of,
)
from mplug_te.linear import DelayedProduct
from mplug_te.recipes import BLOCKWISE, TENSORWISE, Options
from prologues import error
from torch import Tensor

from mplug.tensors.sink import Weights
from mplug_nn import GroupedProduct, Inputs, Prologue
from mplug_nn.activations import ACTIVATIONS
from mplug_nn.grouped import PLAIN_GROUPED, apply_grouped
from mplug_nn.product import WHOLE
from mplug_nn.prologue import apply_fused

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(find_spec("transformer_engine") is None, reason="Transformer Engine is not installed"),
    pytest.mark.filterwarnings("ignore"),  # those of Transformer Engine and of torch's compiler
]
E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"
COUNTS = (0, 200, 41, 15, 128)
I_, O_ = 256, 384
OPTIONS = {"half": Options(), TENSORWISE: Options(), BLOCKWISE: Options(gradient=E4M3, power_of_two=True)}
PRODUCTS: dict[str, GroupedProduct] = {name: groups_by(name, options) for name, options in OPTIONS.items()}


def drawn(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return (scale * torch.randn(shape, device="cuda", generator=generator)).bfloat16()


# Experts.


@pytest.mark.parametrize("format_name", [E4M3, E5M2])
def test_the_operands_of_a_group_are_those_of_the_group_alone(format_name: str) -> None:
    x, counts = drawn(sum(COUNTS) + 8, I_, scale=3.0), torch.tensor(COUNTS)
    for scale in (None, torch.full((1,), 90.0, device="cuda")):
        rows, columns, inverses, largest = cast_groups(x, counts, scale, format_name, False)
        assert float(largest) == (0.0 if scale is None else float(x[: sum(COUNTS)].abs().max()))
        for group in groups_of(counts, ALIGNED):
            alone = cast(x[group.own], scale, format_name, False, True)
            assert torch.equal(rows[group.begin : group.begin + group.rows], alone[0])
            assert torch.equal(part_of(columns, group, I_), alone[1])
            assert torch.equal(inverses[group.number], alone[2][0])
    numbers, of_numbers, columns, of_columns = cast_group_blocks(x, counts, E4M3, True)
    for group in groups_of(counts, BLOCK):
        blocks = cast_blocks(x[group.own], False, E4M3, True, True, True)
        found = (
            numbers[group.whole],
            lines_of(of_numbers, group, I_),
            part_of(columns, group, I_),
            of_columns[blocks_of(group)],
        )
        assert all(map(torch.equal, found, blocks))


def test_the_copies_of_an_expert_are_those_of_its_matrix_alone() -> None:
    weight = drawn(3, O_, I_)
    found, blocks = cast_experts(weight, E4M3, False), cast_expert_blocks(weight, E4M3, True)
    for number, matrix in enumerate(weight):
        rows, columns, inverse, _ = cast(matrix, None, E4M3, False, True)
        assert all(map(torch.equal, (one[number] for one in found[:2]), (rows, columns)))
        assert torch.equal(found[2][number], inverse[0])
        alone = cast_blocks(matrix, True, E4M3, True, True, True)
        assert torch.equal(blocks[0][number], alone[0])
        assert torch.equal(blocks[2][number], alone[2])
        assert torch.equal(blocks[1][number, :, : I_ // BLOCK], alone[1][:, : I_ // BLOCK])  # the rest is padding
        assert torch.equal(blocks[3][number, :, : O_ // BLOCK], alone[3][:, : O_ // BLOCK])


def results(supplier: GroupedProduct, dtype: torch.dtype = torch.bfloat16, call: Any = apply_grouped) -> list[Tensor]:
    total = sum(COUNTS)
    x, grad = drawn(total + 8, I_).to(dtype), drawn(total + 8, O_, seed=2).to(dtype)
    x[total:], grad[total:] = torch.nan, torch.nan
    weight = drawn(len(COUNTS), O_, I_, seed=1, scale=0.1).to(dtype).requires_grad_()
    sink = torch.full(weight.shape, 9.0, device="cuda", dtype=torch.promote_types(dtype, torch.float32))
    x.requires_grad_()
    stale = torch.ones((), dtype=torch.bool)
    y = call(supplier, x, torch.tensor(COUNTS, device="cuda"), Weights(weight, sink, stale))
    y.backward(grad)
    assert x.grad is not None
    return [y.detach()[:total], x.grad[:total], sink]


def test_products_in_bf16_are_as_precise_as_torchs() -> None:
    found, plain = results(PRODUCTS["half"]), results(PLAIN_GROUPED)
    for ours, usual, right in zip(found, plain, results(PLAIN_GROUPED, torch.float64), strict=True):
        assert error(ours, right) <= max(1.1 * error(usual, right), 1e-5)


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_unit_that_inductor_compiles_has_one_graph_and_the_same_bits(name: str) -> None:
    torch.compiler.reset()
    compiled = torch.compile(apply_grouped, fullgraph=True, dynamic=False)
    assert all(map(torch.equal, results(PRODUCTS[name]), results(PRODUCTS[name], call=compiled)))


# Activations.


@pytest.mark.parametrize("kind", FUNCTIONS)
def test_an_activation_is_quantised_from_its_value_in_fp32(kind: str) -> None:
    """A few values on the border between two fp8 numbers may differ by a step."""
    x, scale = drawn(96, I_ * (2 if kind in GATED else 1)), torch.full((1,), 20.0, device="cuda")
    rows, inverse, largest = quantised_activation(x, kind, scale, E4M3)
    function = ACTIVATIONS[kind]
    wide = x.float()
    y = function.compute(*wide.chunk(2, dim=1)) if function.gated else function.compute(wide)
    expected = (y * 20.0).clamp(-448, 448).to(torch.float8_e4m3fn)
    assert float((rows.view(torch.float8_e4m3fn).float() != expected.float()).float().mean()) < 0.01
    assert torch.equal(inverse, 1 / scale)
    assert float(largest) == pytest.approx(float(y.abs().max()), rel=1e-3)


@pytest.mark.parametrize("kind", FUNCTIONS)
def test_a_compiled_activation_with_its_product_is_within_its_rounding_and_has_the_eager_bits(kind: str) -> None:
    product = ActivationProduct(DelayedProduct(E4M3, E5M2, False))
    width = I_ * (2 if kind in GATED else 1)
    state = {name: torch.full((1,), 40.0, device="cuda") for name in ("input_scale", "gradient_scale")}

    def unit(x: Tensor, bias: Tensor, weights: Weights, buffers: dict[str, Tensor]) -> Tensor:
        y: Tensor = apply_fused(product, Prologue(kind), Inputs(x, bias=bias), weights, WHOLE, buffers)
        return y

    torch.compiler.reset()
    outcomes = []
    for call in (unit, torch.compile(unit, fullgraph=True, dynamic=False)):
        leaf, bias = drawn(2, 100, width).requires_grad_(), drawn(width, seed=4).requires_grad_()
        sink, stale = torch.full((O_, I_), 5.0, device="cuda"), torch.ones((), dtype=torch.bool)
        buffers = {**state, **{name: torch.zeros((), device="cuda") for name in ("input", "gradient")}}
        weight = drawn(O_, I_, seed=1, scale=0.1).requires_grad_()
        y = call(leaf, bias, Weights(weight, sink, stale), buffers)
        y.backward(drawn(2, 100, O_, seed=2))
        outcomes.append([y.detach(), leaf.grad, sink, buffers["input"], buffers["gradient"], bias.grad])
    assert all(map(torch.equal, outcomes[0][:5], outcomes[1][:5]))
    assert error(outcomes[1][5], outcomes[0][5]) < 1e-2  # its sum may be in another order
