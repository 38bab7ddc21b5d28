"""The tail of the normal distribution as a power of two: how far GELU and its slope are off with it."""

import math

import pytest
import torch
from torch import Tensor

from mplug_nn import NORMAL_TAIL, NORMAL_TAIL_END, NORMAL_TAIL_SLOPE


def polynomial(coefficients: tuple[float, ...], a: Tensor) -> Tensor:
    return sum((c * a**power for power, c in enumerate(coefficients)), torch.zeros_like(a))


def tail(a: Tensor) -> Tensor:
    return torch.exp2(polynomial(NORMAL_TAIL, a))


def exact_tail(a: Tensor) -> Tensor:
    return 0.5 * torch.special.erfc(a / math.sqrt(2))


def grid(end: float) -> Tensor:
    return torch.linspace(0, end, 200_001, dtype=torch.float64)


def test_gelu_is_off_by_8_6e_7_and_its_slope_by_2_7e_6_at_most() -> None:
    a = grid(40)
    density = torch.exp(-0.5 * a * a) / math.sqrt(2 * math.pi)
    value = (a * (tail(a) - exact_tail(a))).abs()
    slope = (tail(a) * polynomial(NORMAL_TAIL_SLOPE, a) - (exact_tail(a) - a * density)).abs()
    assert 8.4e-7 < float(value.max()) < 8.6e-7
    assert 2.6e-6 < float(slope.max()) < 2.7e-6
    assert int(slope.argmax()) == 0


@pytest.mark.parametrize(("end", "error"), [(3, 4e-5), (4, 6e-3)])
def test_near_zero_the_tail_is_off_by_little_of_itself(end: float, error: float) -> None:
    a = grid(end)
    assert float((tail(a) / exact_tail(a) - 1).abs().max()) < error


def test_the_slope_is_the_derivative_of_the_fitted_value_itself() -> None:
    a = grid(12).requires_grad_()
    (slope,) = torch.autograd.grad((a * tail(a)).sum(), a)
    torch.testing.assert_close(tail(a) * polynomial(NORMAL_TAIL_SLOPE, a), slope, rtol=1e-12, atol=1e-15)


def test_the_tail_falls_everywhere_and_is_nothing_in_fp32_from_its_end_on() -> None:
    powers = polynomial(NORMAL_TAIL, grid(1000))
    assert bool((powers.diff() < 0).all())
    assert float(tail(torch.tensor(NORMAL_TAIL_END, dtype=torch.float32))) == 0
