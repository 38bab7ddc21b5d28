"""The definition of FP8 numbers, scales and products on a CPU, against independent formulas in fp64."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from mplug_fp8 import emulation, grouped, operators
from mplug_fp8.emulation import BLOCK, E4M3, E5M2, padded
from mplug_fp8.products import Blockwise, Delayed, Rowwise, Tensorwise
from mplug_fp8.recipes import Options
from mplug_fp8.scaled import Products
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from mplug_nn import Narrow, Operand, Sink

ALONE = Narrow()
N, I, O = 200, 256, 384  # noqa: E741
RECIPES = {
    "tensorwise": Tensorwise(Options()),
    "delayed": Delayed(Options()),
    "rowwise": Rowwise(Options(power_of_two=True)),
    "blockwise": Blockwise(Options(power_of_two=True)),
}
each_recipe = pytest.mark.parametrize("recipe", RECIPES)
each_format = pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])


def drawn(*shape: int, seed: int = 0) -> Tensor:
    """Random numbers over nine powers of ten, in bf16."""
    generator = torch.Generator().manual_seed(seed)
    sizes = 10 ** (6 * torch.rand(shape, generator=generator) - 4.5)
    return (torch.randn(shape, generator=generator) * sizes).to(torch.bfloat16)


def even(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


def numbers_of(dtype: torch.dtype) -> list[float]:
    """All numbers of a format that are not negative, from its definition (arXiv 2209.05433, table 1), in order.

    The index of a number is its code, and its lowest bit decides ties.
    """
    bits, bias, codes = (3, 7, 0x7F) if dtype == E4M3 else (2, 15, 0x7C)
    found = []
    for code in range(codes):
        exponent, fraction = code >> bits, (code & (2**bits - 1)) / 2**bits
        found.append(fraction * 2.0 ** (1 - bias) if exponent == 0 else (1 + fraction) * 2.0 ** (exponent - bias))
    return found


# Numbers and scales.


@each_format
def test_rounding_is_to_the_nearest_number_with_ties_to_even_and_saturates(dtype: torch.dtype) -> None:
    numbers = torch.tensor(numbers_of(dtype), dtype=torch.float64)
    assert numbers[-1] == emulation.limit(dtype) == {E4M3: 448, E5M2: 57344}[dtype]
    middles = (numbers[1:] + numbers[:-1]) / 2
    x = torch.cat((numbers, middles, middles * (1 + 2.0**-20), middles * (1 - 2.0**-20), drawn(4096).double()))
    x = torch.cat((x, -x, torch.tensor([1e6, -3e38], dtype=torch.float64))).float()
    size = x.double().abs().clamp(max=numbers[-1])
    upper = torch.searchsorted(numbers, size).clamp(max=len(numbers) - 1)
    lower = (upper - 1).clamp(min=0)
    above, below = numbers[upper] - size, size - numbers[lower]
    code = torch.where((above < below) | ((above == below) & (upper % 2 == 0)), upper, lower)
    right = torch.where(size == numbers[upper], numbers[upper], numbers[code]) * x.double().sign()
    assert torch.equal(emulation.rounded(x, torch.ones(1), dtype).double(), right)


@each_format
@pytest.mark.parametrize("power_of_two", [False, True], ids=["", "power"])
def test_a_scale_maps_the_largest_value_to_the_end_of_the_format(dtype: torch.dtype, power_of_two: bool) -> None:
    largest = drawn(500).abs().float()
    scale, inverse = emulation.scales_of(largest, dtype, power_of_two)
    exact = [emulation.limit(dtype) / float(value) for value in largest]
    if power_of_two:
        assert scale.tolist() == [2.0 ** math.floor(math.log2(value)) for value in exact]
        assert inverse.tolist() == [1 / float(value) for value in scale]
    else:
        assert scale.tolist() == torch.tensor(exact, dtype=torch.float64).float().tolist()
    odd = torch.tensor([0.0, 1e-45, math.inf, math.nan])
    scale, inverse = emulation.scales_of(odd, dtype, power_of_two)
    assert scale[:2].tolist() == [1, 2.0**126]
    assert inverse[:2].tolist() == [1, 2.0**-126]
    assert torch.stack((scale[2:], inverse[2:])).isnan().all()


def blocks_of(recipe: str, n: int, i: int) -> Tensor:
    """[N, I] -> the number of the block of each element, from which its scale follows."""
    row, column = torch.meshgrid(torch.arange(n), torch.arange(i), indexing="ij")
    return {
        "tensorwise": torch.zeros_like(row),
        "rowwise": row,
        "lines": row * 1000 + column // BLOCK,
        "blocks": row // BLOCK * 1000 + column // BLOCK,
    }[recipe]


def quantised_by_loops(x: Tensor, recipe: str, power_of_two: bool) -> Tensor:
    """The values that a quantised x [N, I] stands for, in fp64: one block at a time."""
    found, blocks = torch.zeros(x.shape, dtype=torch.float64), blocks_of(recipe, *x.shape)
    for block in blocks.unique():
        mask = blocks == block
        scale = torch.tensor(448.0) / x[mask].float().abs().max()
        if power_of_two:
            scale = 2 ** torch.floor(torch.log2(scale.double()))
        numbers = (x[mask].float() * scale.float()).clamp(-448, 448).to(E4M3)
        found[mask] = numbers.double() * (torch.ones(()) / scale.float()).double()
    return found


def test_every_block_of_numbers_has_its_own_scale() -> None:
    x, lines = drawn(128, 256), {"lines": emulation.cast_lines, "blocks": emulation.cast_blocks}
    rows, inverse = emulation.cast(x, emulation.largest_of(x).view(1), E4M3, False)
    assert torch.equal(rows.double() * inverse.double(), quantised_by_loops(x, "tensorwise", False))
    for power in (False, True):
        rows, row_inverse, columns, column_inverse = (found[0] for found in emulation.cast_rowwise(x[None], power))
        assert torch.equal(rows.double() * row_inverse.double()[:, None], quantised_by_loops(x, "rowwise", power))
        values = columns.double() * column_inverse.double()[:, None]
        assert torch.equal(values, quantised_by_loops(x.t(), "rowwise", power))
    for name, cast in lines.items():
        rows, row_inverse, columns, column_inverse = cast(x)
        for matrix, numbers, inverse in ((x, rows, row_inverse), (x.t(), columns, column_inverse)):
            wide = (
                inverse.t() if name == "lines" else inverse[:, : matrix.shape[1] // BLOCK].repeat_interleave(BLOCK, 0)
            )
            values = numbers.double() * wide.double().repeat_interleave(BLOCK, 1)
            assert torch.equal(values, quantised_by_loops(matrix, name, True)), name


def test_columns_are_the_transpose_padded_with_zeros() -> None:
    x = drawn(37, 64)
    rows, columns, _ = operators.cast(x, operators.largest(x), False, False, True, True)
    assert columns.shape == (64, 48)
    assert not columns[:, 37:].float().any()
    assert torch.equal(columns[:, :37].float(), rows.float().t())
    assert torch.equal(operators.transposed(rows).float(), columns.float())
    lines = operators.cast_lines(even(130, 128), True, True)
    assert lines[0].shape == (256, 128)
    assert not lines[0][130:].float().any()
    assert not lines[2][:, 130:].float().any()


# Products.


def buffers_of(x: Tensor, grad_y: Tensor) -> dict[str, Tensor]:
    found = {"input": torch.zeros(()), "gradient": torch.zeros(())}
    for name, tensor, dtype in (("input", x, E4M3), ("gradient", grad_y, E5M2)):
        found[f"{name}_scale"] = emulation.scales_of(emulation.largest_of(tensor).view(1), dtype, False)[0]
    return found


def passes(supplier: Products, x: Tensor, weight: Tensor, grad_y: Tensor, sink: Sink | None = None) -> list[Any]:
    buffers = buffers_of(x, grad_y)
    operand = Operand(weight, supplier.cast(weight, buffers))
    y, saved = supplier.forward(x, operand, ALONE, buffers)
    grad_x, grad_weight = supplier.backward(grad_y, operand, saved, sink, ALONE, buffers, True)
    return [y, grad_x, grad_weight]


def values_of(supplier: Products, x: Tensor, operand: str, buffers: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """(the values of rows, those of columns transposed) that stand for x [N, X], in fp64, without padding."""
    found = []
    for numbers, factor in supplier.quantised(x, supplier.measured(x, None), operand, buffers):
        wide = factor.double()
        wide = wide.t().repeat_interleave(BLOCK, 1) if wide.dim() == 2 else wide[:, None]
        found.append(numbers.double() * wide)
    return found[0][: len(x)], found[1].t()[: len(x)]


@each_recipe
def test_products_are_exact_but_for_the_rounding_of_sums(recipe: str) -> None:
    """The error is at most that of adding K terms in fp32, and of rounding the result to bf16."""
    supplier, x, weight, grad_y = RECIPES[recipe], even(N, I), even(O, I, seed=1), even(N, O, seed=2)
    buffers, total = buffers_of(x, grad_y), torch.full((O, I), 7.0)
    y, grad_x, _ = passes(supplier, x, weight, grad_y, Sink(total, torch.ones((), dtype=torch.bool)))
    x_rows, x_columns = values_of(supplier, x, "input", buffers)
    g_rows, g_columns = values_of(supplier, grad_y, "gradient", buffers)
    scaling = {"tensorwise": "tensorwise", "delayed": "tensorwise"}.get(recipe, recipe)
    if recipe == "blockwise":
        w_rows = w_columns = quantised_by_loops(weight, "blocks", True)
    elif recipe == "rowwise":
        w_rows = quantised_by_loops(weight, scaling, True)
        w_columns = quantised_by_loops(weight.t(), scaling, True).t()
    else:
        w_rows = w_columns = quantised_by_loops(weight, scaling, False)
    for name, found, a, b in (
        ("y", y, x_rows, w_rows.t()),
        ("grad_x", grad_x, g_rows, w_columns),
        ("grad_weight", total, g_columns.t(), x_columns),
    ):
        exact, sizes = a @ b, a.abs() @ b.abs()
        bound = sizes * a.shape[1] * 2.0**-24 + (exact.abs() * 2.0**-8 if found.dtype == torch.bfloat16 else 0)
        assert ((found.double() - exact).abs() <= bound).all(), name
    far = ((y.double() - x.double() @ weight.double().t()).norm() / y.double().norm()).item()
    assert 0.01 < far < 0.06  # e4m3 has four bits of significand, so a factor is off by up to 6%


@each_recipe
def test_kept_copies_change_no_bit_and_take_half_the_bytes_of_a_weight_and_of_an_input(recipe: str) -> None:
    """Rowwise scaling keeps two copies of a weight, whose rows and columns have different scales."""
    x, weight, grad_y = even(N, I), even(O, I, seed=1), even(N, O, seed=2)
    plain, buffers = RECIPES[recipe], buffers_of(x, grad_y)
    again, keeping = replace(plain, keeps_input=True), replace(plain, keeps_weights=True)
    for one in (again, keeping):
        assert all(map(torch.equal, passes(one, x, weight, grad_y), passes(plain, x, weight, grad_y)))
    _, saved = again.forward(x, Operand(weight, again.cast(weight, buffers)), ALONE, buffers)
    assert saved[0] is x
    assert sum(tensor.numel() for tensor in saved[1:]) == (recipe == "tensorwise")
    assert sum(tensor.nbytes for tensor in plain.cast(weight, buffers)) <= 4
    casts = keeping.cast(weight, buffers)
    _, saved = keeping.forward(x, Operand(weight, casts), ALONE, buffers)
    numbers = [sum(tensor.numel() for tensor in tensors if tensor.itemsize == 1) for tensors in (casts, saved)]
    rows = padded(N, BLOCK) if recipe == "blockwise" else padded(N)
    assert numbers == [weight.numel() * (1 + (recipe == "rowwise")), I * rows]
    assert sum(tensor.nbytes for tensor in (*casts, *saved) if tensor.itemsize > 1) < 0.04 * weight.nbytes


@each_recipe
def test_a_stale_total_is_overwritten_and_a_later_product_is_added(recipe: str) -> None:
    supplier, x, weight, grad_y = RECIPES[recipe], even(64, 128), even(128, 128, seed=1), even(64, 128, seed=2)
    alone = passes(supplier, x, weight, grad_y)[2]
    total, stale = torch.full((128, 128), 7.0), torch.ones((), dtype=torch.bool)
    passes(supplier, x, weight, grad_y, Sink(total, stale))
    assert torch.equal(total.to(torch.bfloat16), alone)
    assert not stale
    first = total.clone()
    passes(supplier, x, weight, grad_y, Sink(total, stale))
    assert torch.equal(total, 2 * first)


@each_recipe
def test_shapes_of_batches_and_rows_that_do_not_fill_a_block_change_nothing(recipe: str) -> None:
    supplier, weight = RECIPES[recipe], even(128, 128, seed=1)
    x, grad_y = even(2, 77, 128), even(2, 77, 128, seed=2)
    y, grad_x, grad_weight = passes(supplier, x, weight, grad_y)
    assert y.shape == grad_x.shape == x.shape
    more = torch.zeros(102, 128, dtype=torch.bfloat16)
    filled = (torch.cat((tensor.flatten(0, 1), more)) for tensor in (x, grad_y))
    wide_x, wide_grad = filled
    whole = passes(supplier, wide_x, weight, wide_grad)
    assert torch.equal(whole[0][:154], y.flatten(0, 1))
    assert torch.equal(whole[1][:154], grad_x.flatten(0, 1))
    assert torch.equal(whole[2], grad_weight)


@each_recipe
@pytest.mark.parametrize("bad", [math.inf, math.nan], ids=["inf", "nan"])
def test_a_number_that_is_not_finite_never_becomes_finite(recipe: str, bad: float) -> None:
    supplier, tensors = RECIPES[recipe], [even(128, 128, seed=seed) for seed in range(3)]
    for which, reached in ((0, (0, 2)), (1, (0, 1)), (2, (1, 2))):
        given = [tensor.clone() for tensor in tensors]
        given[which][5, 9] = bad
        buffers = buffers_of(tensors[0], tensors[2])
        operand = Operand(given[1], supplier.cast(given[1], buffers))
        y, saved = supplier.forward(given[0], operand, ALONE, buffers)
        results: list[Any] = [y, *supplier.backward(given[2], operand, saved, None, ALONE, buffers, True)]
        found = [bool(result.isfinite().all()) for result in results]
        assert not any(found[result] for result in reached), f"operand {which}: {found}"


# Groups of rows.


def test_a_grouped_product_is_that_of_each_group_alone() -> None:
    supplier = grouped.RowwiseGroups(Options(power_of_two=True))
    single = Rowwise(Options(power_of_two=True))
    ends = torch.tensor([0, 33, 33, 80], dtype=torch.int32)
    x, grad_y, weight = even(90, 64), even(90, 96, seed=1), even(4, 96, 64, seed=2)
    x[80:] = math.nan  # rows after the groups have arbitrary content
    operand, total = Operand(weight, supplier.cast(weight, {})), torch.full((4, 96, 64), 7.0)
    y, saved = supplier.forward(x, operand, ends, {})
    grad_x, operands = supplier.dgrad(grad_y, operand, saved, ends, {}, True)
    supplier.wgrad(operands, Sink(total, torch.ones((), dtype=torch.bool)), ends, {})
    assert grad_x is not None
    for group, (start, stop) in enumerate([(0, 0), (0, 33), (33, 33), (33, 80)]):
        alone = torch.zeros(96, 64)
        sink = Sink(alone, torch.ones((), dtype=torch.bool))
        right = passes(single, x[start:stop], weight[group], grad_y[start:stop], sink)
        assert torch.equal(y[start:stop], right[0])
        assert torch.equal(grad_x[start:stop], right[1])
        torch.testing.assert_close(total[group], alone, rtol=1e-5, atol=1e-5)
    assert supplier.dgrad(grad_y, operand, saved, ends, {}, False)[0] is None


# Operators.


def calls() -> dict[str, Callable[[], Any]]:
    x, weight, ends = even(37, 128), even(128, 128), torch.tensor([7, 37], dtype=torch.int32)
    rows = emulation.rounded(x, torch.ones(1), E4M3)
    wide, one = emulation.rounded(weight, torch.ones(1), E4M3), torch.ones(1)
    return {
        "largest": lambda: operators.largest(x),
        "cast": lambda: operators.cast(x, one, False, False, True, True),
        "cast to rows": lambda: operators.cast(x, one, True, False, True, False),
        "cast_scaled": lambda: operators.cast_scaled(x, one, torch.zeros(()), True, False, False, True),
        "cast_columns": lambda: operators.cast_columns(x, one, True),
        "transposed": lambda: operators.transposed(rows),
        "cast_rowwise": lambda: operators.cast_rowwise(x[None], True, True, True),
        "cast_rowwise to columns": lambda: operators.cast_rowwise(x[None], True, False, True),
        "cast_lines": lambda: operators.cast_lines(x, True, True),
        "cast_lines to rows": lambda: operators.cast_lines(x, True, False),
        "cast_blocks": lambda: operators.cast_blocks(weight, True, True),
        "cast_blocks to columns": lambda: operators.cast_blocks(weight, False, True),
        "multiply": lambda: operators.multiply(rows, wide, one, one, "tensor", "tensor", True),
        "cast_grouped": lambda: grouped.cast_grouped(x, ends, True),
        "multiply_grouped": lambda: grouped.multiply_grouped(
            rows, wide[None].repeat(2, 1, 1), torch.ones(37), torch.ones(2, 128), ends, True
        ),
    }


@pytest.mark.parametrize("name", calls())
def test_an_operator_says_the_shapes_of_its_results_without_computing(name: str) -> None:
    def described(found: Any) -> list[Any]:
        tensors = found if isinstance(found, tuple) else (found,)
        return [(tensor.shape, tensor.dtype, tensor.stride()) for tensor in tensors]

    real = described(calls()[name]())
    with FakeTensorMode(allow_non_fake_inputs=True):
        fake = described(calls()[name]())
    assert real == fake


def test_delayed_scaling_keeps_the_largest_value_except_in_a_recomputation() -> None:
    x, scale, kept = even(16, 16), torch.ones(1), torch.zeros(())
    operators.cast_scaled(x, scale, kept, False, False, True, True)
    operators.cast_scaled(x / 2, scale, kept, False, False, True, True)
    assert kept == x.float().abs().max()

    class Backward(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, leaf: Tensor, in_backward: bool, statistic: Tensor) -> Tensor:
            ctx.given = in_backward, statistic
            return leaf.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            in_backward, statistic = ctx.given
            operators.cast_scaled(x, scale, statistic, False, in_backward, True, True)
            return grad, None, None

    for in_backward in (False, True):
        statistic, leaf = torch.zeros(()), torch.ones((), requires_grad=True)
        Backward.apply(leaf, in_backward, statistic).backward()  # type: ignore[no-untyped-call]
        assert bool(statistic) == in_backward
