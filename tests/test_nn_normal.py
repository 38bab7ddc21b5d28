"""The tail of the normal distribution as a power of two: how far GELU and its slope are off with it."""

import math

import torch
from torch import Tensor

from mplug_nn import NORMAL_TAIL, NORMAL_TAIL_END, NORMAL_TAIL_SLOPE


def polynomial(coefficients: tuple[float, ...], a: Tensor) -> Tensor:
    return sum((c * a**power for power, c in enumerate(coefficients)), torch.zeros_like(a))


def tail(a: Tensor) -> Tensor:
    return torch.exp2(polynomial(NORMAL_TAIL, a))


def test_gelu_is_off_by_8_6e_7_and_its_slope_which_is_its_derivative_by_2_7e_6_at_most() -> None:
    a = torch.linspace(0, 40, 200_001, dtype=torch.float64)
    leaf = a.clone().requires_grad_()
    exact, density = 0.5 * torch.special.erfc(a / math.sqrt(2)), torch.exp(-0.5 * a * a) / math.sqrt(2 * math.pi)
    value, slope = (a * (tail(a) - exact)).abs(), tail(a) * polynomial(NORMAL_TAIL_SLOPE, a)
    error = (slope - (exact - a * density)).abs()
    assert 8.4e-7 < float(value.max()) < 8.6e-7
    assert 2.6e-6 < float(error.max()) < 2.7e-6
    assert int(error.argmax()) == 0
    for end, most in ((3, 4e-5), (4, 6e-3)):
        assert float((tail(a) / exact - 1)[a < end].abs().max()) < most, "near zero the tail is off by little of itself"
    torch.testing.assert_close(slope, torch.autograd.grad((leaf * tail(leaf)).sum(), leaf)[0], rtol=1e-12, atol=1e-15)


def test_the_tail_falls_everywhere_and_is_nothing_in_fp32_from_its_end_on() -> None:
    powers = polynomial(NORMAL_TAIL, torch.linspace(0, 1000, 200_001, dtype=torch.float64))
    assert bool((powers.diff() < 0).all())
    assert float(tail(torch.tensor(NORMAL_TAIL_END, dtype=torch.float32))) == 0
