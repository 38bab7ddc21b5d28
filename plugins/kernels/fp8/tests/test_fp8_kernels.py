"""The Triton kernels give the bits of the definition, numbers and inverses; torch's products are within their bound.

The kernels run on a GPU, or on a CPU in Triton's interpreter (TRITON_INTERPRET=1).
"""

import math
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from mplug_fp8 import emulation
from mplug_fp8.emulation import BLOCK, E4M3, E5M2, padded
from mplug_fp8.grouped import RowwiseGroups
from mplug_fp8.products import Blockwise, Delayed, Rowwise, Tensorwise
from mplug_fp8.recipes import Options
from torch import Tensor
from triton_kernels import (
    DEVICE,
    INTERPRETED,
    assert_bits,
    assert_interpreted,
    outside_of_the_interpreter,
    runs,
    torchs_rounding,
)

from mplug_nn import Narrow, Operand, Sink

__all__ = ["torchs_rounding"]
SHAPES = [(48, 64), (37, 160), (1, 16), (16, 32)] if INTERPRETED else [(48, 64), (1000, 2064), (4096, 2048), (1, 16)]
LINES = [(150, 256), (128, 128)] if INTERPRETED else [(150, 256), (1000, 384), (4096, 2048)]
each_format = pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])
powers = pytest.mark.parametrize("power", [False, True], ids=["", "power"])


@outside_of_the_interpreter
def test_what_runs_on_a_gpu_runs_in_tritons_interpreter_too() -> None:
    assert_interpreted(Path(__file__), Path(__file__).with_name("test_prologue_kernels.py"))


@pytest.fixture
def launch() -> Any:
    return import_module("mplug_fp8.launch")


def drawn(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    sizes = 10 ** (6 * torch.rand(shape, generator=generator) - 4.5)
    x = (torch.randn(shape, generator=generator) * sizes).to(torch.bfloat16)
    x[..., 0], x[..., -1, :] = 0, x[..., -1, :] * (x.shape[-2] == 1)
    return x


@runs
@each_format
@powers
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_cast_with_one_scale_has_the_bits_of_the_definition(
    launch: Any, shape: tuple[int, int], power: bool, dtype: torch.dtype
) -> None:
    x = drawn(*shape)
    given = x.to(DEVICE)
    rows = torch.empty(shape, dtype=dtype, device=DEVICE)
    columns = torch.empty((shape[1], padded(shape[0])), dtype=dtype, device=DEVICE)
    found = launch.largest_of(given)
    assert float(found.max()) == float(emulation.largest_of(x))
    inverse = launch.cast(given, found, None, dtype, power, True, rows, columns)
    right, right_inverse = emulation.cast(x, emulation.largest_of(x).view(1), dtype, power)
    assert_bits((rows, columns, inverse), (right, emulation.transposed(right), right_inverse))
    again = torch.empty_like(columns)
    launch.transposed(rows, again)
    assert_bits((again,), (columns,))


@runs
def test_rows_that_ranks_cast_with_the_largest_value_of_all_have_the_bits_of_the_whole(launch: Any) -> None:
    x = drawn(74, 160)
    parts = [part.contiguous().to(DEVICE) for part in (x[:37], x[37:])]
    found = torch.stack([launch.largest_of(part).amax().view(1) for part in parts]).amax(dim=0)
    rows = [torch.empty(part.shape, dtype=E4M3, device=DEVICE) for part in parts]
    inverses = [
        launch.cast(part, found, None, E4M3, False, True, own, None) for part, own in zip(parts, rows, strict=True)
    ]
    right, right_inverse = emulation.cast(x, emulation.largest_of(x).view(1), E4M3, False)
    whole = torch.cat([own.view(torch.uint8) for own in rows]).view(E4M3)
    assert_bits((whole, *inverses), (right, right_inverse, right_inverse))


@runs
@each_format
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_cast_with_a_known_scale_keeps_the_largest_value(
    launch: Any, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    x, scale = drawn(*shape), torch.tensor([3e5])  # some numbers saturate in each format
    rows = torch.empty(shape, dtype=dtype, device=DEVICE)
    statistic = torch.zeros((), device=DEVICE)
    given = (x.to(DEVICE), scale.to(DEVICE))
    inverse = launch.cast(*given, statistic, dtype, False, False, rows, None)
    assert_bits((rows, inverse), (emulation.rounded(x, scale, dtype), 1 / scale))
    assert float(statistic) == float(x.float().abs().max())
    statistic.fill_(1e9)
    launch.cast(*given, statistic, dtype, False, False, rows, None)
    assert float(statistic) == 1e9


@runs
@pytest.mark.filterwarnings("ignore:invalid value")  # of the interpreter
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan], ids=str)
def test_numbers_that_are_not_finite_have_the_bits_of_the_definition(launch: Any, bad: float) -> None:
    x = drawn(128, 128)
    x[7, 5] = bad
    given = x.to(DEVICE)
    for dtype in (E4M3, E5M2):
        rows = torch.empty((128, 128), dtype=dtype, device=DEVICE)
        inverse = launch.cast(given, launch.largest_of(given), None, dtype, False, True, rows, None)
        assert_bits((rows,), (emulation.cast(x, emulation.largest_of(x).view(1), dtype, False)[0],))
        assert inverse.isnan()
        launch.cast(given, torch.ones(1, device=DEVICE), None, dtype, False, False, rows, None)
        assert_bits((rows,), (emulation.rounded(x, torch.ones(1), dtype),))
    for name, arguments in (("cast_rowwise", (x[None], True)), ("cast_lines", (x,)), ("cast_blocks", (x,))):
        tensors = (arguments[0].to(DEVICE), *arguments[1:])
        found, right = (getattr(one, name)(*given) for one, given in ((launch, tensors), (emulation, arguments)))
        for number in (0, 2):
            assert_bits((found[number],), (right[number],))
        for number in (1, 3):  # the sign and payload of NaN differ
            torch.testing.assert_close(found[number].cpu(), right[number], rtol=0, atol=0, equal_nan=True)


@runs
@pytest.mark.parametrize("stale", [True, False])
def test_products_of_groups_are_added_to_their_sum_and_those_of_no_rows_are_0(launch: Any, stale: bool) -> None:
    ends = torch.tensor([0, 3, 3, 8], dtype=torch.int32, device=DEVICE)
    products, total = drawn(4, 90, 50).to(DEVICE), torch.full((4, 90, 50), 7.0, device=DEVICE)
    products[0], products[2] = torch.nan, torch.nan
    launch.add_groups(total, products, ends, stale)
    right = torch.full((4, 90, 50), 0.0 if stale else 7.0, device=DEVICE)
    right[[1, 3]] = products[[1, 3]].float() if stale else products[[1, 3]].float() + 7
    assert_bits((total,), (right,))


@runs
@powers
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_rowwise_cast_has_the_bits_of_the_definition(launch: Any, shape: tuple[int, int], power: bool) -> None:
    x = torch.stack((drawn(*shape), drawn(*shape, seed=1)))
    assert_bits(launch.cast_rowwise(x.to(DEVICE), power), emulation.cast_rowwise(x, power))


@runs
@pytest.mark.parametrize("shape", LINES, ids=str)
def test_a_blockwise_cast_has_the_bits_of_the_definition(launch: Any, shape: tuple[int, int]) -> None:
    x = drawn(*shape)
    assert_bits(launch.cast_lines(x.to(DEVICE)), emulation.cast_lines(x))
    weight = drawn(padded(shape[0], BLOCK), shape[1])
    assert_bits(launch.cast_blocks(weight.to(DEVICE)), emulation.cast_blocks(weight))


@runs
@powers
@pytest.mark.parametrize(
    "counts", [(0, 33, 0, 47), (1,), (32, 32), (0, 0, 5)] if INTERPRETED else [(0, 33, 0, 47), (500, 1, 1547)], ids=str
)
def test_a_grouped_cast_has_the_bits_of_the_definition(launch: Any, counts: tuple[int, ...], power: bool) -> None:
    ends = torch.tensor(counts).cumsum(0).to(torch.int32)
    x = drawn(int(ends[-1]) + 11, 160)
    found, right = launch.cast_grouped(x.to(DEVICE), ends.to(DEVICE), power), emulation.cast_grouped(x, ends, power)
    stop, end = int(ends[-1]), int(right[4][-1])
    inside = [(one[0][:stop], one[1][:stop], one[2][:, :end], one[4]) for one in (found, right)]
    assert_bits(inside[0], inside[1])
    full = torch.tensor(counts) > 0
    assert_bits((found[3].cpu()[full],), (right[3][full],))


# torch's products on a GPU.


def normal(*shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(torch.bfloat16) for shape in shapes]


def passes(
    device: str, supplier: Any, given: list[Tensor], how: Any, buffers: dict[str, Tensor]
) -> tuple[Tensor, Tensor, Any]:
    """The output and the gradient of the input, of x, a weight and the gradient of y; the operands of the weight's."""
    x, weight, grad_y = (one.to(device) for one in given)
    operand = Operand(weight, supplier.cast(weight, buffers))
    y, saved = supplier.forward(x, operand, how, buffers)
    grad_x, operands = supplier.dgrad(grad_y, operand, saved, how, buffers, True)
    return y, grad_x, operands


def abs_product(a: Tensor, b: Tensor) -> Tensor:
    return a.double().abs() @ b.double().abs()


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="these are products of torch")
class TestProductsOnAGPU:
    @pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "rowwise", "blockwise"])
    @pytest.mark.parametrize("shape", [(512, 256, 384), (500, 1024, 640)], ids=str)
    def test_products_are_within_the_bound_of_their_sums(self, recipe: str, shape: tuple[int, int, int]) -> None:
        """Tensor cores keep at least 13 bits of the terms of a sum (arXiv 2412.19437, section 3.3.2)."""
        if recipe == "blockwise" and torch.cuda.get_device_capability()[0] != 9:
            pytest.skip("blockwise products need compute capability 9")
        kinds = {"tensorwise": Tensorwise, "delayed": Delayed, "rowwise": Rowwise, "blockwise": Blockwise}
        supplier = kinds[recipe](Options(power_of_two=recipe in ("rowwise", "blockwise")))
        n, i, o = shape
        x, weight, grad_y = normal((n, i), (o, i), (n, o))
        found = {}
        for device in ("cpu", "cuda"):
            scale = torch.full((1,), 64.0, device=device)
            buffers = {name: torch.zeros((), device=device) for name in ("input", "gradient")}
            buffers |= {"input_scale": scale, "gradient_scale": scale}
            y, grad_x, operands = passes(device, supplier, [x, weight, grad_y], Narrow(), buffers)
            total, stale = torch.full((o, i), 7.0, device=device), torch.ones((), dtype=torch.bool)
            supplier.wgrad(operands, Sink(total, stale), Narrow(), buffers)
            assert not stale
            first = total.clone()
            supplier.wgrad(operands, Sink(total, stale), Narrow(), buffers)
            assert torch.equal(total, 2 * first)
            # A sink may begin at any address; here it is no multiple of 16 bytes.
            half = torch.zeros(4 + o * i, device=device, dtype=torch.bfloat16)[4:].view(o, i)
            supplier.wgrad(operands, Sink(half, torch.ones((), dtype=torch.bool)), Narrow(), buffers)
            found[device] = [y, grad_x, first, half, supplier.wgrad(operands, None, Narrow(), buffers)]
        sizes = [abs_product(x, weight.t()), abs_product(grad_y, weight), abs_product(grad_y.t(), x)]
        for number, (exact, ours) in enumerate(zip(*found.values(), strict=True)):
            rounding = 0 if number == 2 else 2.0**-7
            bound = sizes[min(number, 2)] * 2.0**-13 + rounding * exact.double().abs()
            error = (ours.cpu().double() - exact.double()).abs()
            assert (error <= bound).all(), (
                f"result {number} is off by {float((error / bound).max()):.1f} times its bound"
            )

    def test_grouped_products_are_within_the_bound_of_their_sums(self) -> None:
        if torch.cuda.get_device_capability()[0] not in (9, 10):
            pytest.skip("torch's grouped product needs compute capability 9 or 10")
        supplier, ends = RowwiseGroups(Options(power_of_two=True)), torch.tensor([0, 133, 133, 480], dtype=torch.int32)
        found = {}
        for device in ("cpu", "cuda"):
            own = ends.to(device)
            y, grad_x, operands = passes(device, supplier, normal((500, 256), (4, 384, 256), (500, 384)), own, {})
            total, stale = torch.full((4, 384, 256), 7.0, device=device), torch.ones((), dtype=torch.bool)
            supplier.wgrad(operands, Sink(total, stale), own, {})
            assert not stale
            found[device] = [y[:480], grad_x[:480], total]
        for number, (exact, ours) in enumerate(zip(*found.values(), strict=True)):
            error, size = (ours.cpu().double() - exact.double()).abs(), exact.double()
            assert (error <= 2.0**-7 * (size.std() + size.abs())).all(), f"result {number}"
        assert not found["cuda"][2][[0, 2]].any()
