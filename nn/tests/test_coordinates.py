"""Rotary positions of several coordinates, beside formulas of complex numbers in fp64."""

import pytest
import torch
from torch import Tensor

from mplug_nn import Attention, Rotary
from mplug_nn.rotary import alternating, axial, contiguous
from mplug_nn.turning import rotate

B, S, H, K = 2, 5, 3, 16
PAIRS = K // 2


def turned(x: Tensor, angles: Tensor) -> Tensor:
    """x [B, S, H, K] with pairs (i, i + K/2) as complex numbers, times exp(i angle): angles [B, S, K/2]."""
    first, second = x.chunk(2, dim=-1)
    y = torch.complex(first, second) * torch.polar(torch.ones_like(angles), angles)[:, :, None]
    return torch.cat((y.real, y.imag), dim=-1)


@pytest.fixture
def x() -> Tensor:
    return torch.randn(B, S, H, K, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def places() -> Tensor:
    return torch.randint(40, (B, S, 3), generator=torch.Generator().manual_seed(2))


def frequency(pair: int, pairs: int, theta: float = 50.0) -> float:
    return float(theta ** (-pair / pairs))


def test_contiguous_sections_turn_by_time_row_and_column(x: Tensor, places: Tensor) -> None:
    rotary = Rotary(50.0, division="contiguous", sections=(2, 3, 3))
    by = [0, 0, 1, 1, 1, 2, 2, 2]
    angles = torch.stack([places[..., c].double() * frequency(i, PAIRS) for i, c in enumerate(by)], dim=-1)
    torch.testing.assert_close(rotate(x, places, rotary.turns(K)), turned(x, angles), rtol=0, atol=1e-13)


def test_alternating_sections_turn_by_time_row_and_column(x: Tensor, places: Tensor) -> None:
    rotary = Rotary(50.0, division="alternating", sections=(4, 2, 2))
    by = [0, 1, 2, 0, 1, 2, 0, 0]
    angles = torch.stack([places[..., c].double() * frequency(i, PAIRS) for i, c in enumerate(by)], dim=-1)
    torch.testing.assert_close(rotate(x, places, rotary.turns(K)), turned(x, angles), rtol=0, atol=1e-13)


def test_axial_positions_turn_half_of_the_pairs_by_rows_and_half_by_columns(x: Tensor, places: Tensor) -> None:
    half = PAIRS // 2
    angles = torch.stack([places[..., i // half].double() * frequency(i % half, half) for i in range(PAIRS)], dim=-1)
    found = rotate(x, places, Rotary(50.0, division="axial").turns(K))
    torch.testing.assert_close(found, turned(x, angles), rtol=0, atol=1e-13)


@pytest.mark.parametrize("rotary", [("contiguous", (2, 3, 3)), ("alternating", (4, 2, 2))])
def test_equal_coordinates_turn_as_plain_positions(x: Tensor, rotary: tuple[str, tuple[int, ...]]) -> None:
    positions = torch.arange(S)[None] * 3
    turns = Rotary(50.0, division=rotary[0], sections=rotary[1]).turns(K)
    plain = rotate(x, positions, 50.0)
    assert torch.equal(rotate(x, positions, turns), rotate(x, positions[..., None].expand(-1, -1, 3), turns))
    torch.testing.assert_close(rotate(x, positions, turns), plain, rtol=0, atol=1e-13)


def test_a_scaling_divides_the_frequencies_of_every_coordinate(x: Tensor, places: Tensor) -> None:
    linear = Rotary(50.0, "linear", (("factor", 4.0),), division="contiguous", sections=(2, 3, 3))
    plain = Rotary(50.0, division="contiguous", sections=(2, 3, 3))
    found = rotate(x, 4 * places, linear.turns(K))
    torch.testing.assert_close(found, rotate(x, places, plain.turns(K)), rtol=0, atol=1e-12)


def test_the_released_divisions() -> None:
    assert contiguous(64, (16, 24, 24))[0] == (0,) * 16 + (1,) * 24 + (2,) * 24
    found = alternating(64, (24, 20, 20))[0]
    assert found == tuple(i % 3 if i < 60 else 0 for i in range(64))
    assert [found.count(c) for c in range(3)] == [24, 20, 20]
    assert axial(40, ())[1][:2] == (0.0, 1 / 20)


def test_sites_ask_for_coordinates_by_name() -> None:
    rotary = Rotary(50.0, division="alternating", sections=(4, 2, 2))
    attention = Attention(32, 2, 2, K, bias=False, qk_norm=False, theta=rotary)
    for slot in ("Attention.prepare_qk", "Attention.prepare_qkv"):
        assert attention.needs(slot, ()) == {"coordinate rotary"}


def test_coordinates_compile_without_a_break(x: Tensor, places: Tensor) -> None:
    turns = Rotary(50.0, division="alternating", sections=(4, 2, 2)).turns(K)
    compiled = torch.compile(rotate, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, places, turns), rotate(x, places, turns), rtol=0, atol=1e-13)


@pytest.mark.parametrize(
    ("rotary", "sentence"),
    [
        (("contiguous", (2, 3)), r"'contiguous' needs sections that sum to 8 pairs, not \[2, 3\]"),
        (("alternating", (1, 1, 6)), "cannot give the coordinates"),
        (("axial", (4, 4)), "takes no sections"),
        (("contiguos", (8,)), "did you mean 'contiguous'"),
    ],
)
def test_a_division_that_does_not_fit_is_refused(rotary: tuple[str, tuple[int, ...]], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        Rotary(50.0, division=rotary[0], sections=rotary[1]).turns(K)
