"""The products of experts around Transformer Engine's functions, by stand-ins in plain torch.

M rows in the order of the groups, I in, O out.
"""

import math
from typing import Any
from warnings import catch_warnings

import pytest
import torch
from engine_in_torch import engine
from mplug_te.grouped import groups_by
from mplug_te.linear import HalfProduct, product_of
from mplug_te.recipes import BLOCKWISE, DELAYED, GRADIENT, INPUT, TENSORWISE, Options
from prologues import drawn
from torch import Tensor

from mplug.tensors.sink import Weights
from mplug_compile.tracer import prepare_compiler
from mplug_nn import DelayedScaling, GroupedProduct, Product
from mplug_nn.grouped import apply_grouped
from mplug_nn.product import WHOLE, apply_product

__all__ = ["engine"]
I_, O_ = 128, 256
COUNTS = (0, 33, 16, 0, 7)
ROWS = sum(COUNTS) + 4
"""Rows after the last group have arbitrary content."""
OPTIONS = {
    "half": Options(),
    TENSORWISE: Options(),
    DELAYED: Options(),
    BLOCKWISE: Options(gradient="float8_e4m3fn", power_of_two=True),
}
PRODUCTS: dict[str, GroupedProduct] = {name: groups_by(name, options) for name, options in OPTIONS.items()}
ALONE: dict[str, Product] = {
    name: HalfProduct() if name == "half" else product_of(name, options) for name, options in OPTIONS.items()
}
each = pytest.mark.parametrize("name", PRODUCTS)


def buffers_of(name: str) -> dict[str, Tensor]:
    if name != DELAYED:
        return {}
    scales = {
        DelayedScaling.scale_name(INPUT): torch.full((1,), 90.0),
        DelayedScaling.scale_name(GRADIENT): torch.ones(1),
    }
    return {INPUT: torch.zeros(()), GRADIENT: torch.zeros(()), **scales}


def rows_of(width: int, seed: int = 0) -> Tensor:
    """Rows [M, width], with garbage after the last group."""
    x = drawn(ROWS, width, seed=seed)
    x[sum(COUNTS) :] = math.nan
    return x


def results(name: str, sink: Tensor | None, stale: bool = True, call: Any = apply_grouped) -> list[Tensor]:
    """The output, the gradient of the rows, and that of the weights (or their sink), without rows after the groups."""
    x, weight = rows_of(I_).requires_grad_(), drawn(len(COUNTS), O_, I_, seed=1, scale=0.1).requires_grad_()
    held = Weights(weight, sink, None if sink is None else torch.tensor(stale))
    buffers = buffers_of(name)
    y = call(PRODUCTS[name], x, torch.tensor(COUNTS), held, buffers=buffers)
    y.backward(rows_of(O_, seed=2))
    assert x.grad is not None
    of_weight = weight.grad if sink is None else sink
    assert of_weight is not None
    return [y.detach()[: sum(COUNTS)], x.grad[: sum(COUNTS)], of_weight, *buffers.values()]


def alone(name: str) -> list[Tensor]:
    """The same by the product of a linear layer for each group."""
    x, grad, weight = rows_of(I_), rows_of(O_, seed=2), drawn(len(COUNTS), O_, I_, seed=1, scale=0.1)
    found: list[list[Tensor]] = [[], [], []]
    buffers = buffers_of(name)
    start = 0
    for number, count in enumerate(COUNTS):
        part, sink = slice(start, start + count), torch.zeros(O_, I_)
        start += count
        if count:
            leaf, matrix = x[part].clone().requires_grad_(), weight[number].clone().requires_grad_()
            stale = torch.ones((), dtype=torch.bool)
            y = apply_product(ALONE[name], leaf, Weights(matrix, sink, stale), WHOLE, buffers)
            y.backward(grad[part])
            assert leaf.grad is not None
            found[0].append(y.detach())
            found[1].append(leaf.grad)
        found[2].append(sink)
    return [torch.cat(found[0]), torch.cat(found[1]), torch.stack(found[2]), *buffers.values()]


@each
def test_each_group_is_multiplied_as_a_linear_layer_of_its_own(name: str) -> None:
    found, right = results(name, torch.full((len(COUNTS), O_, I_), math.nan)), alone(name)
    assert all(map(torch.equal, found, right))
    without_sink = results(name, None)
    assert torch.equal(without_sink[2], right[2].bfloat16())


@each
def test_a_sink_that_is_not_stale_is_added_to_and_groups_without_rows_leave_it(name: str) -> None:
    sink = torch.full((len(COUNTS), O_, I_), 7.0)
    results(name, sink, stale=False)
    torch.testing.assert_close(sink, 7 + alone(name)[2], rtol=1e-5, atol=1e-4)
    assert bool((sink[0] == 7).all())


@each
def test_without_any_rows_gradients_are_zero(name: str) -> None:
    x, weight = drawn(0, I_).requires_grad_(), drawn(2, O_, I_).requires_grad_()
    sink = torch.full((2, O_, I_), 7.0)
    stale = torch.ones((), dtype=torch.bool)
    counts, held = torch.zeros(2, dtype=torch.int64), Weights(weight, sink, stale)
    y = apply_grouped(PRODUCTS[name], x, counts, held, buffers=buffers_of(name))
    y.sum().backward()
    assert y.shape == (0, O_)
    assert x.grad is not None
    assert x.grad.shape == (0, I_)
    assert not sink.any()


@pytest.mark.wide("compile")
def test_a_blockwise_product_traces_into_one_graph_and_the_results_are_the_same() -> None:
    """The suite's cases are too narrow for it."""
    prepare_compiler()
    torch.compiler.reset()
    sinks = [torch.zeros(len(COUNTS), O_, I_) for _ in range(2)]
    compiled = torch.compile(apply_grouped, backend="aot_eager", fullgraph=True)
    with catch_warnings(action="ignore"):  # torch's own, as it traces
        found = results(BLOCKWISE, sinks[0], call=compiled)
    torch.compiler.reset()
    assert all(map(torch.equal, found, results(BLOCKWISE, sinks[1])))
