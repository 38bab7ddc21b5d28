"""Rows of experts: the same places, rows, sums and gradients as the plain torch of the slots' defaults.

N tokens, k choices of a token, D width, E experts.
"""

import os
from typing import Any

import pytest
import torch
from mplug_triton.rows import combine, dispatch
from torch import Tensor

from mplug_nn import SLOTS

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
pytestmark = pytest.mark.usefixtures("kernels_run")
plain_dispatch, plain_combine = (SLOTS[f"Experts.{name}"].default for name in ("dispatch", "combine"))
E = 5
GATES = torch.empty(0)
"""`dispatch` reads no gates."""

LOADS = ["drawn", "dropped", "all to one", "all dropped", "one token"]


def choices(load: str, k: int, tokens: int = 150) -> Tensor:
    """The chosen experts [N, k]; N k is beyond one program's choices."""
    generator = torch.Generator().manual_seed(0)
    tokens = 1 if load == "one token" else tokens
    chosen = torch.rand(tokens, E, generator=generator).topk(k, dim=-1).indices
    if load == "all to one":
        chosen = torch.full_like(chosen, 3)
    if load == "dropped":
        chosen = chosen.masked_fill(torch.rand(chosen.shape, generator=generator) < 0.3, E)
    if load == "all dropped":
        chosen = torch.full_like(chosen, E)
    return chosen.to(DEVICE)


def drawn(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


@pytest.mark.parametrize("bounded", [False, True], ids=["a row for each choice", "a row for each kept choice"])
@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("load", LOADS)
def test_choices_have_the_places_of_a_stable_sort(load: str, k: int, bounded: bool) -> None:
    chosen = choices(load, k)
    bound = (int((chosen < E).sum()),) if bounded else ()
    x = drawn(len(chosen), 8, seed=1)
    rows, counts, route = dispatch(x, chosen, GATES, E, *bound)
    right_rows, right_counts, right_route = plain_dispatch(x, chosen, GATES, E, *bound)
    assert torch.equal(counts, right_counts)
    assert counts.dtype == right_counts.dtype
    for own, right in zip(route, right_route, strict=True):
        assert torch.equal(own, right)
        assert own.dtype == right.dtype
    total = int(counts.sum())
    assert rows.shape == right_rows.shape
    assert torch.equal(rows[:total], right_rows[:total])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("load", "width"), [("drawn", 33), ("dropped", 64), ("all to one", 16), ("all dropped", 16)])
def test_rows_come_back_weighed_with_all_gradients(load: str, width: int, dtype: torch.dtype) -> None:
    k = 3
    chosen = choices(load, k, tokens=23)
    bound = (max(1, int((chosen < E).sum())),) if load == "dropped" else ()
    x, weight = (drawn(rows, width, seed=rows, dtype=dtype) for rows in (23, bound[0] if bound else 23 * k))
    gates, grad = drawn(23, k, seed=3).masked_fill(chosen == E, 0), drawn(23, width, seed=4, dtype=dtype)

    def outcome(send: Any, fetch: Any, wide: torch.dtype) -> dict[str, Tensor]:
        leaves = [x.to(wide).requires_grad_(), gates.to(torch.promote_types(wide, torch.float32)).requires_grad_()]
        rows, counts, route = send(leaves[0], chosen, leaves[1], E, *bound)
        inside = torch.arange(len(rows), device=DEVICE)[:, None] < counts.sum()
        y = fetch(torch.where(inside, rows * weight.to(wide), torch.nan), leaves[1], route)
        gradients = torch.autograd.grad(y, leaves, grad.to(wide))
        return dict(zip(("y", "x", "gates"), (y.detach(), *gradients), strict=True))

    found = outcome(dispatch, combine, dtype)
    for name, right in outcome(plain_dispatch, plain_combine, torch.float64).items():
        tolerance = (1e-2 if dtype == torch.bfloat16 else 1e-6) * max(1.0, float(right.abs().max()))
        torch.testing.assert_close(found[name].double(), right, rtol=0, atol=tolerance)


def test_a_combination_of_plain_torch_understands_the_route_and_the_other_way_round() -> None:
    chosen, x, gates = choices("dropped", 2, tokens=9), drawn(9, 16, seed=1), drawn(9, 2, seed=2)
    gates = gates.masked_fill(chosen == E, 0)
    every = []
    for send, fetch in ((dispatch, plain_combine), (plain_dispatch, combine), (plain_dispatch, plain_combine)):
        rows, _, route = send(x, chosen, gates, E)
        every.append(fetch(rows, gates, route))
    torch.testing.assert_close(every[0], every[2])
    torch.testing.assert_close(every[1], every[2])


@pytest.mark.filterwarnings("ignore")  # torch's own, as it traces
def test_compiled_rows_are_those_of_eager_torch() -> None:
    chosen, gates = choices("dropped", 2, tokens=9), drawn(9, 2, seed=2)

    def moved(x: Tensor) -> Tensor:
        rows, _, route = dispatch(x, chosen, gates, E)
        return combine(rows * 2, gates, route)

    found = []
    for call in (moved, torch.compile(moved, backend="aot_eager", fullgraph=True)):
        x = drawn(9, 16, seed=1).requires_grad_()
        y = call(x)
        y.backward(torch.ones_like(y))
        found.append((y.detach(), x.grad))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
