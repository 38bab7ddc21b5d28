"""GELU from a fitted power of two: how far off it is, and what a compiler makes of it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from mplug_triton.gelu import activation
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch import config as functorch
from torch.nn import functional as F

DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=pytest.mark.gpu,
    ),
]
Activate = Callable[[Tensor], Tensor]


def fitted(x: Tensor) -> Tensor:
    return activation(x, None, "gelu")


def as_it_runs_on(device: str) -> Activate:
    """Compiled on a GPU, where a compiler's arithmetic is its own."""
    torch.compiler.reset()
    compiled: Activate = torch.compile(fitted, backend="inductor", fullgraph=True, dynamic=False)
    return compiled if device == "cuda" else fitted


def value_and_slope(activate: Activate, x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """In fp64, of what is computed in `dtype`."""
    leaf = x.to(dtype).requires_grad_()
    y = activate(leaf)
    (slope,) = torch.autograd.grad(y, leaf, torch.ones_like(y))
    assert y.dtype == slope.dtype == dtype
    return y.detach().double(), slope.double()


# What it computes.


@pytest.mark.parametrize("end", [12.0, 1e4])
def test_values_are_within_1e_6_of_fp64_and_slopes_within_2_8e_6_before_they_are_rounded(end: float) -> None:
    x = torch.linspace(-end, end, 1_000_001)
    ours = value_and_slope(fitted, x, torch.float32)
    exact = value_and_slope(F.gelu, x, torch.float64)
    for found, right, allowed in zip(ours, exact, (1e-6, 2.8e-6), strict=True):
        assert float((found - right).abs().max()) < allowed


@pytest.mark.filterwarnings("ignore")  # torch's own, as it traces
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("spread", [0.1, 1.0, 4.0])
def test_in_half_precision_it_is_as_near_to_fp64_as_torchs_own(dtype: torch.dtype, spread: float, device: str) -> None:
    drawn = torch.randn(200_000, generator=torch.Generator().manual_seed(0))
    x = (spread * drawn).to(device, dtype)
    found = value_and_slope(as_it_runs_on(device), x, dtype)
    plain, exact = (value_and_slope(F.gelu, x, kind) for kind in (dtype, torch.float64))
    for ours, usual, right in zip(found, plain, exact, strict=True):
        error, allowed = (float((one - right).norm() / right.norm()) for one in (ours, usual))
        assert error <= 1.001 * allowed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_beyond_all_tails_and_at_infinity_it_is_what_it_tends_to_and_nan_gives_nan(dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    x = torch.tensor([-largest, -1e4, -30.0, 30.0, 1e4, largest])
    value, slope = value_and_slope(fitted, x, dtype)
    assert torch.equal(value, x.to(dtype).double().clamp(min=0))
    assert slope.tolist() == [0, 0, 0, 1, 1, 1]

    value, slope = value_and_slope(fitted, torch.tensor([0.0, float("inf"), float("-inf"), float("nan")]), dtype)
    assert value[:3].tolist() == [0, float("inf"), 0]
    assert slope[:3].tolist() == pytest.approx([0.5, 1, 0], abs=2.8e-6)
    assert value[3].isnan()
    assert slope[3].isnan()


@pytest.mark.filterwarnings("ignore")  # torch's own, as it traces
def test_between_two_products_one_tensor_of_the_mlps_width_is_kept_for_backward() -> None:
    rows, dim, ffn_dim = 16, 8, 32
    outputs: list[tuple[int, ...]] = []

    def keep(graph: torch.fx.GraphModule, _: Any) -> Any:
        returned: Any = graph.graph.output_node().args[0]
        outputs.extend(tuple(node.meta["val"].shape) for node in returned)
        return make_boxed_func(graph.forward)

    def mlp(x: Tensor, up: Tensor, bias: Tensor, down: Tensor) -> Tensor:
        return activation(x @ up, bias, "gelu") @ down

    torch.compiler.reset()
    backend = aot_autograd(
        fw_compiler=keep,
        bw_compiler=lambda graph, _: make_boxed_func(graph.forward),
        partition_fn=min_cut_rematerialization_partition,
    )
    shapes = ((rows, dim), (dim, ffn_dim), (ffn_dim,), (ffn_dim, dim))
    leaves = [torch.randn(shape).bfloat16().requires_grad_() for shape in shapes]
    with functorch.patch(ban_recompute_materialized_backward=False):
        torch.compile(mlp, backend=backend, fullgraph=True)(*leaves).sum().backward()
    assert outputs.count((rows, ffn_dim)) == 1
