"""Norms and activations with the product of their result around Transformer Engine's functions, by stand-ins.

`TestDelayedProducts` of `test_linear.py` runs the suite's checks on them.
"""

from typing import Any

import pytest
import torch
from engine_in_torch import engine
from mplug_te.activations import FUNCTIONS, ActivationProduct
from mplug_te.linear import DelayedProduct
from mplug_te.prologues import NormProduct
from mplug_te.recipes import GRADIENT, INPUT, Options
from prologues import NORMS, B, D, S, assert_exact, kept_and_statistic, travelled
from torch import Tensor

from mplug_nn import FusedProduct

__all__ = ["engine"]
DELAYED = DelayedProduct(Options().forward, Options().gradient, Options().power_of_two)


def product(kind: str) -> FusedProduct:
    return NormProduct(DELAYED) if kind in NORMS else ActivationProduct(DELAYED)


def buffers() -> dict[str, Tensor]:
    scales = {"input_scale": torch.full((1,), 16.0), "gradient_scale": torch.full((1,), 256.0)}
    return {INPUT: torch.zeros(()), GRADIENT: torch.zeros(()), **scales}


@pytest.mark.parametrize("rows", [(B, S), (3, 7)], ids=str)
@pytest.mark.parametrize("full", [True, False], ids=["full", "bare"])
@pytest.mark.parametrize("kind", [*NORMS, *FUNCTIONS])
def test_values_and_gradients_are_those_of_the_exact_composition(kind: str, full: bool, rows: tuple[int, ...]) -> None:
    assert_exact(product(kind), kind, full, rows, buffers)


@pytest.mark.parametrize(
    ("kind", "side", "times"), [("rmsnorm", "before", 2), ("gelu_tanh", "before", 2), ("gelu_tanh", "after", 1)]
)
def test_the_collectives_of_a_boundary_give_the_product_of_the_whole_and_numbers_travel_in_fp8(
    kind: str, side: str, times: int
) -> None:
    assert travelled(product(kind), kind, side, buffers) == [(torch.uint8, S)] * times


@pytest.mark.parametrize(
    ("kind", "width", "copies", "rounding"),
    [("rmsnorm", D, [(torch.uint8, (B, S, D))], 1e-2), ("swiglu", 2 * D, [], 1e-6)],
)
def test_in_bf16_only_what_the_prologue_reads_is_kept_and_the_statistics_are_those_of_its_result(
    kind: str, width: int, copies: list[Any], rounding: float
) -> None:
    """A norm rounds to bf16, and keeps the fp8 numbers."""
    kept, statistic, largest = kept_and_statistic(product(kind), kind, buffers())
    assert kept == [(torch.bfloat16, (B, S, width)), *copies]
    assert statistic == pytest.approx(largest, rel=rounding)
