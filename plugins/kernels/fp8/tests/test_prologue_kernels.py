"""The kernels of norms and activations give the fp8 numbers of the definition; gradients are within their rounding.

They run on a GPU, or on a CPU in Triton's interpreter (TRITON_INTERPRET=1); `test_fp8_kernels.py` starts it.
"""

import pytest
import torch
from mplug_fp8 import emulation, prologue_emulation
from mplug_fp8.emulation import E4M3, padded
from mplug_fp8.prologue_emulation import Statistics
from torch import Tensor
from triton_kernels import DEVICE, INTERPRETED, assert_bits, bits, runs, torchs_rounding

__all__ = ["torchs_rounding"]
SHAPES = [(48, 64), (37, 160), (1, 16)] if INTERPRETED else [(48, 64), (1000, 2064), (4096, 2048), (1, 16), (300, 8192)]
SCALE = 100.0
"""Some numbers of a norm saturate."""
shapes = pytest.mark.parametrize("shape", SHAPES, ids=str)
norms = pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
activations = pytest.mark.parametrize("kind", ["gelu", "gelu_tanh", "swiglu"])
optional = pytest.mark.parametrize("full", [True, False], ids=["full", "bare"])


def drawn(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return (scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).bfloat16().to(DEVICE)


def fresh(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=DEVICE)


def of_norm(shape: tuple[int, int], kind: str, full: bool) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
    x, weight = drawn(*shape, seed=1) + 0.5, 1 + drawn(shape[1], seed=2, scale=0.2)
    return x, drawn(*shape, seed=3) if full else None, weight, drawn(shape[1], seed=4) if full else None


def on_cpu(*tensors: Tensor) -> list[Tensor]:
    return [tensor.cpu() for tensor in tensors]


@runs
@shapes
@norms
@optional
def test_a_norm_in_fp8_has_the_bits_of_the_definition(shape: tuple[int, int], kind: str, full: bool) -> None:
    from mplug_fp8 import prologue_launch

    (n, i), centred = shape, kind == "layernorm"
    x, residual, weight, bias = of_norm(shape, kind, full)
    scale, statistic = torch.full((1,), SCALE, device=DEVICE), torch.zeros((), device=DEVICE)
    rows, inverse, summed = fresh(n, i, dtype=E4M3), fresh(1), fresh(n, i, dtype=x.dtype)
    found = Statistics(fresh(n if centred else 0), fresh(n))
    prologue_launch.normed(x, residual, weight, bias, 1e-5, scale, statistic, rows, inverse, summed, found)
    whole = (x if residual is None else x + residual).cpu()
    if residual is not None:
        assert torch.equal(summed.cpu(), whole)
    expected = prologue_emulation.statistics_of(whole, 1e-5, centred)
    given = Statistics(*on_cpu(*found))
    for ours, right in zip(given, expected, strict=True):
        torch.testing.assert_close(ours, right, rtol=1e-5, atol=1e-6)
    y = prologue_emulation.normed(whole, given, weight.cpu(), None if bias is None else bias.cpu())
    numbers = emulation.rounded(y, scale.cpu(), E4M3)
    assert_bits((rows, inverse), (numbers, 1 / scale))
    assert float(statistic) == float(y.abs().max())
    again = x if residual is None else summed
    for columns, right in ((True, emulation.transposed(numbers)), (False, numbers)):
        given_numbers = fresh(*right.shape, dtype=E4M3)
        prologue_launch.normed_again(again, found, weight, bias, scale, given_numbers, columns)
        assert_bits((given_numbers,), (right,))
    prologue_launch.normed(x, residual, weight, bias, 1e-5, scale, None, rows, inverse, summed, found)
    assert float(statistic) == float(y.abs().max())


@runs
@shapes
@norms
@optional
def test_the_gradient_of_a_norm_is_that_of_the_definition(shape: tuple[int, int], kind: str, full: bool) -> None:
    from mplug_fp8 import prologue_launch

    x, _, weight, bias = of_norm(shape, kind, full)
    grad, beside = drawn(*shape, seed=5), drawn(*shape, seed=6)
    statistics = prologue_emulation.statistics_of(x.cpu(), 1e-5, kind == "layernorm")
    on_device = Statistics(*(one.to(DEVICE) for one in statistics))
    grad_s, grads = torch.empty_like(x), fresh(2 if full else 1, shape[1], dtype=weight.dtype)
    prologue_launch.norm_gradient(grad, beside, x, on_device, weight, grad_s, grads)
    tensors = on_cpu(grad, beside, x)
    right, of_weights = prologue_emulation.norm_gradient(*tensors, statistics, weight.cpu(), bias is not None)
    torch.testing.assert_close(grad_s.cpu(), right, rtol=1.6e-2, atol=1e-2)
    torch.testing.assert_close(grads.cpu(), of_weights, rtol=1.6e-2, atol=2e-2)


@runs
@shapes
@activations
@optional
def test_an_activation_in_fp8_is_that_of_the_definition(shape: tuple[int, int], kind: str, full: bool) -> None:
    """Exponentials differ in their last bit, so a few numbers round to the other side: by one step of the format."""
    from mplug_fp8 import prologue_launch

    n, i = shape
    wide = i * (2 if kind == "swiglu" else 1)
    x, bias = drawn(n, wide, seed=1, scale=2.0), drawn(wide, seed=2) if full else None
    scale, statistic = torch.full((1,), SCALE, device=DEVICE), torch.zeros((), device=DEVICE)
    rows, inverse = fresh(n, i, dtype=E4M3), fresh(1)
    prologue_launch.activated(x, bias, kind, scale, statistic, rows, inverse)
    own_bias = None if bias is None else bias.cpu()
    y = prologue_emulation.activated(x.cpu(), own_bias, kind)
    assert_near(rows, emulation.rounded(y, scale.cpu(), E4M3))
    torch.testing.assert_close(statistic.cpu(), y.abs().max(), rtol=1e-5, atol=1e-6)
    assert_bits((inverse,), (1 / scale,))
    grad = drawn(n, i, seed=3)
    right = prologue_emulation.activation_gradient(grad.cpu(), x.cpu(), own_bias, kind)
    for columns, numbers in ((True, emulation.transposed(rows.cpu())), (False, rows.cpu())):
        grad_x, found = torch.empty_like(x), fresh(*numbers.shape, dtype=E4M3)
        grad_bias = fresh(wide if full else 0, dtype=x.dtype)
        prologue_launch.activation_gradient(grad, x, bias, kind, scale, grad_x, grad_bias, found, columns)
        assert_near(found, numbers)
        torch.testing.assert_close(grad_x.cpu(), right.bfloat16(), rtol=1.6e-2, atol=1e-4)
        if full:
            torch.testing.assert_close(grad_bias.cpu(), right.sum(0).bfloat16(), rtol=1.6e-2, atol=1e-3)


def assert_near(found: Tensor, right: Tensor) -> None:
    """At most one of a thousand numbers (and one in all) is the neighbour of the right one; the others are equal."""
    assert (found.shape, found.dtype) == (right.shape, right.dtype)
    steps = (bits(found).int() - bits(right).int()).abs()
    assert int(steps.max()) <= 1
    assert int((steps > 0).sum()) <= max(1, found.numel() // 1000)
    assert padded(1) == emulation.ROWS
