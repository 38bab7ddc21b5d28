"""GELU from a fitted power of two: how far off it is, what a compiler makes of it, and where it is offered."""

import re
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from mplug_triton import Triton
from mplug_triton.gelu import activation
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch._functorch import config as functorch
from torch.nn import functional as F

from mplug import Site, UsageError
from mplug.model.build import build_model
from mplug.model.slots.offers import PLAIN
from mplug_nn import SLOTS
from mplug_nn.mlp import activation as composition
from mplug_testing import precision_named, run_workers
from mplug_testing.harness import Trace, difference, tiny_run, train_steps

DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA GPU here")],
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
def test_beyond_all_tails_it_is_x_or_zero_and_nothing_overflows(dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    x = torch.tensor([-largest, -1e4, -30.0, 30.0, 1e4, largest])
    value, slope = value_and_slope(fitted, x, dtype)
    assert torch.equal(value, x.to(dtype).double().clamp(min=0))
    assert slope.tolist() == [0, 0, 0, 1, 1, 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_infinities_give_what_it_tends_to_and_nan_gives_nan(dtype: torch.dtype) -> None:
    value, slope = value_and_slope(fitted, torch.tensor([0.0, float("inf"), float("-inf"), float("nan")]), dtype)
    assert value[:3].tolist() == [0, float("inf"), 0]
    assert slope[:3].tolist() == pytest.approx([0.5, 1, 0], abs=2.8e-6)
    assert value[3].isnan()
    assert slope[3].isnan()


@pytest.mark.parametrize("biased", [False, True])
def test_the_bias_is_added_before_and_has_its_gradient(biased: bool) -> None:
    drawn = torch.randn(3, 2, 5, 8, generator=torch.Generator().manual_seed(0)).unbind()
    x, upstream, bias = drawn[0].requires_grad_(), drawn[1], drawn[2][0, 0].requires_grad_() if biased else None

    def outcome(activate: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        y = activate(x, bias, "gelu")
        return y, *torch.autograd.grad(y, [x] if bias is None else [x, bias], upstream)

    torch.testing.assert_close(outcome(activation), outcome(composition), rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", ["gelu_tanh", "swiglu"])
def test_other_kinds_are_the_compositions_to_the_bit(kind: Any) -> None:
    x, bias = torch.randn(6, 8), torch.randn(8)
    assert torch.equal(activation(x, bias, kind), composition(x, bias, kind))


# Compiled.


@pytest.mark.filterwarnings("ignore")  # torch's own, as it traces
def test_it_traces_into_one_graph() -> None:
    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(activation, backend=counter, fullgraph=True)
    x, bias = (torch.randn(shape).bfloat16().requires_grad_() for shape in ((4, 8), (8,)))
    found: list[tuple[Tensor, ...]] = []
    for activate in (compiled, activation):
        y = activate(x, bias, "gelu")
        found.append((y, *torch.autograd.grad(y.sum(), (x, bias))))
    torch.testing.assert_close(*found, rtol=0, atol=0)
    assert counter.frame_count == 1


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


# Where it is offered.


class Block(SimpleNamespace):
    """A module with every slot."""

    SLOTS = (*SLOTS.values(),)


def answer(
    kind: str = "gelu",
    compiler: str | None = "inductor",
    precision: str = "bf16",
    named: bool = True,
    needs: frozenset[str] = frozenset(),
) -> bool | str:
    offer = next(one for one in Triton(Triton.Config()).offer() if "MLP.activation" in one.suppliers)
    site = Site("blocks.*.mlp", "MLP.activation", Block(kind=kind), "", needs)
    config = SimpleNamespace(
        trainer=SimpleNamespace(precision=precision, compile=compiler or "never"),
        kernels=SimpleNamespace(kinds={"activation": "kernels/triton"} if named else {}),
    )
    formats = precision_named(precision)
    run: Any = SimpleNamespace(device="cuda", compiler=compiler, config=config, precision=formats)
    return offer.answer(site, run)


@pytest.mark.parametrize("named", [True, False])
def test_it_serves_exact_gelu_in_compiled_units_of_half_precision(named: bool) -> None:
    assert answer(named=named) is True


@pytest.mark.parametrize(
    ("elsewhere", "reason"),
    [
        (
            {"kind": "swiglu"},
            r"supports 'gelu' only, and this site's activation is 'swiglu'; set kernels\.activation=null",
        ),
        (
            {"kind": "gelu_tanh"},
            r"supports 'gelu' only, and this site's activation is 'gelu_tanh'; set kernels\.activation=null",
        ),
        ({"precision": "fp32"}, r"errors of up to 2\.8e-6, which are too large for float32"),
        ({"compiler": None}, r"units are eager \(trainer\.compile=never on 'cuda'\)"),
        ({"needs": frozenset({"log-sum-exp"})}, r"it does not offer log-sum-exp"),
    ],
)
def test_elsewhere_it_says_why_not_where_it_is_named_and_else_leaves_the_site_alone(
    elsewhere: dict[str, Any], reason: str
) -> None:
    assert re.search(reason, str(answer(**elsewhere)))
    assert answer(**elsewhere, named=False) is False


HERE = {"trainer.precision": "bf16", "trainer.compile": "aot_eager", "trainer.seq_length": 12, "model.num_layers": 2}


def suppliers(**settings: Any) -> set[str]:
    model = build_model(tiny_run({**HERE, **settings}))
    return {filled.supplier for filled in model.slots if filled.site.slot == "MLP.activation"}


def test_a_run_that_names_it_gets_it() -> None:
    assert suppliers(**{"kernels.activation": "triton"}) == {"kernels/triton"}


def test_a_run_that_names_it_where_it_cannot_serve_is_refused_with_the_reason() -> None:
    message = (
        r"kernels/triton cannot serve MLP\.activation of 'blocks\.\*\.mlp': it supports 'gelu' only, .* is 'swiglu'"
    )
    with pytest.raises(UsageError, match=message):
        suppliers(**{"kernels.activation": "triton", "model.activation": "swiglu"})


@pytest.mark.parametrize(
    ("otherwise", "supplier"),
    [
        ({}, "kernels/triton"),
        ({"model.activation": "swiglu"}, PLAIN),
        ({"trainer.precision": "fp32"}, PLAIN),
        ({"trainer.compile": "auto"}, PLAIN),
    ],
)
def test_as_the_default_kernel_it_serves_where_it_can_and_leaves_the_rest_to_plain_torch(
    otherwise: dict[str, Any], supplier: str
) -> None:
    elsewhere = {"kernels.qk": None, "kernels.norm": None}  # which want a GPU
    assert suppliers(**{"kernels.default": "triton", **elsewhere, **otherwise}) == {supplier}


def trained(settings: dict[str, Any]) -> Trace:
    warnings.simplefilter("ignore")  # torch's own, as it traces
    return train_steps(settings)


@pytest.mark.wide("compile")
def test_a_compiled_run_with_it_is_the_run_in_plain_torch() -> None:
    plain, ours = (run_workers(1, trained, {**HERE, "kernels.activation": name})[0] for name in (None, "triton"))
    assert difference([ours], plain, 5e-2) == ""  # each is as far as that from the run in fp32
