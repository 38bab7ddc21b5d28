"""Norms with the residual addition before them: what they compute, and what a backward pass makes of them.

N rows of D numbers.
"""

import os
from collections.abc import Callable, Mapping
from itertools import product
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from mplug_triton.norm import norm_residual
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd

from mplug_nn.norm import Kind
from mplug_nn.norm import norm_residual as composition

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
pytestmark = pytest.mark.usefixtures("kernels_run")

KINDS: tuple[Kind, ...] = ("layernorm", "rmsnorm")
EPS = 1e-5
NormResidual = Callable[..., tuple[Tensor, Tensor]]
Leaves = dict[str, Tensor]
Types = Mapping[str, torch.dtype]
ALL_FP32: Types = {}
Operators = Callable[[Callable[[], object]], list[str]]

each_kind = pytest.mark.parametrize("kind", KINDS)
with_and_without = pytest.mark.parametrize("residual", [True, False], ids=["residual", "alone"])


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def inputs(rows: tuple[int, ...], d: int, residual: bool, bias: bool, types: Types = ALL_FP32) -> Leaves:
    """Rows around 0.5, weights around 1; fp32 unless `types` says otherwise of one of them."""
    given = {"x": 0.5 + drawn(*rows, d, seed=1), "weight": 1 + 0.2 * drawn(d, seed=2)}
    if residual:
        given["residual"] = 2 * drawn(*rows, d, seed=3)
    if bias:
        given["bias"] = drawn(d, seed=4)
    return {name: x.to(DEVICE, types.get(name, torch.float32)).requires_grad_() for name, x in given.items()}


def called(norm: NormResidual, leaves: Leaves, kind: Kind) -> tuple[Tensor, Tensor]:
    return norm(leaves["x"], leaves.get("residual"), leaves["weight"], leaves.get("bias"), EPS, kind)


def outcome(norm: NormResidual, leaves: Leaves, kind: Kind, roots: tuple[int, ...] = (0, 1)) -> Leaves:
    """The normed sum, the sum, and the gradients of all leaves by those outputs that are roots."""
    outputs = called(norm, leaves, kind)
    upstream = [drawn(*outputs[i].shape, seed=5 + i).to(DEVICE, outputs[i].dtype) for i in roots]
    gradients = torch.autograd.grad([outputs[i] for i in roots], list(leaves.values()), upstream, allow_unused=True)
    found = {"normed sum": outputs[0].detach(), "sum": outputs[1].detach()}
    return found | {
        f"gradient of {name}": torch.zeros_like(leaf) if gradient is None else gradient
        for (name, leaf), gradient in zip(leaves.items(), gradients, strict=True)
    }


def exactly(leaves: Leaves) -> Leaves:
    return {name: x.detach().double().requires_grad_() for name, x in leaves.items()}


def assert_near(ours: Leaves, exact: Leaves, tolerance: float) -> None:
    """Each within a tolerance of fp64's, relative to the largest number of all."""
    assert ours.keys() == exact.keys()
    size = max(float(right.abs().max()) for right in exact.values())
    for name, right in exact.items():
        error = float((ours[name].double() - right).abs().max())
        assert error <= tolerance * size, f"{name} is off by {error:.2e}, where the largest number is {size:.2e}"


def assert_exact(leaves: Leaves, kind: Kind, tolerance: float = 3e-6, roots: tuple[int, ...] = (0, 1)) -> Leaves:
    ours = outcome(norm_residual, leaves, kind, roots)
    assert_near(ours, outcome(composition, exactly(leaves), kind, roots), tolerance)
    return ours


# What they compute.

SHAPES = {
    "a tile that is not full": ((3,), 64),
    "whole tiles, and programs that take several in turn": ((2, 128), 64),
    "a row more than whole tiles": ((257,), 32),
    "a width that is no power of two": ((2, 23), 48),
    "an odd width": ((70,), 33),
    "rows wider than a tile": ((3,), 2500),
    "rows of one number": ((5,), 1),
}


@each_kind
@with_and_without
@pytest.mark.parametrize(("rows", "d"), SHAPES.values(), ids=SHAPES)
def test_values_and_gradients_are_those_of_plain_torch_in_fp64(
    rows: tuple[int, ...], d: int, residual: bool, kind: Kind
) -> None:
    assert_exact(inputs(rows, d, residual, bias=residual), kind)


@each_kind
@with_and_without
@pytest.mark.parametrize("root", [0, 1], ids=["normed sum", "sum"])
def test_an_output_that_nobody_uses_adds_nothing_to_the_gradients(root: int, residual: bool, kind: Kind) -> None:
    ours = assert_exact(inputs((70,), 24, residual, bias=True), kind, roots=(root,))
    if root == 1:
        assert not ours["gradient of weight"].any()
        assert torch.equal(ours["gradient of x"], drawn(70, 24, seed=6).to(DEVICE))


@each_kind
@pytest.mark.parametrize(
    ("needed", "residual"),
    [("x", True), ("residual", True), ("weight bias", True), ("bias", True), ("weight bias", False)],
)
def test_what_needs_no_gradient_gets_none_and_the_rest_its_own(needed: str, residual: bool, kind: Kind) -> None:
    leaves = inputs((70,), 24, residual, bias=True)
    whole = outcome(norm_residual, leaves, kind)
    given = {name: x.detach().requires_grad_(name in needed.split()) for name, x in leaves.items()}
    outputs = [one for one in called(norm_residual, given, kind) if one.requires_grad]
    torch.autograd.backward(outputs, [drawn(70, 24, seed=5 + i).to(DEVICE) for i in range(len(outputs))])
    for name, x in given.items():
        assert (x.grad is not None) == (name in needed.split())
        assert x.grad is None or torch.equal(x.grad, whole[f"gradient of {name}"])


TYPES: dict[str, tuple[Types, torch.dtype]] = {
    "all in bf16": (dict.fromkeys(("x", "residual", "weight", "bias"), torch.bfloat16), torch.bfloat16),
    "weights in fp32": (dict.fromkeys(("x", "residual"), torch.bfloat16), torch.bfloat16),
    "a bias in fp32": (dict.fromkeys(("x", "residual", "weight"), torch.bfloat16), torch.bfloat16),
    "weights in bf16": (dict.fromkeys(("weight", "bias"), torch.bfloat16), torch.float32),
    "a residual stream in fp32": (dict.fromkeys(("x", "weight", "bias"), torch.bfloat16), torch.float32),
    "x in fp32": (dict.fromkeys(("residual", "weight", "bias"), torch.bfloat16), torch.float32),
}


@each_kind
@pytest.mark.parametrize(("types", "wide"), TYPES.values(), ids=TYPES)
def test_outputs_have_the_type_of_the_sum_and_gradients_that_of_their_leaf(
    types: Types, wide: torch.dtype, kind: Kind
) -> None:
    leaves = inputs((70,), 24, residual=True, bias=True, types=types)
    ours = assert_exact(leaves, kind, 2e-2)
    assert ours["normed sum"].dtype == ours["sum"].dtype == wide
    assert all(ours[f"gradient of {name}"].dtype == x.dtype for name, x in leaves.items())
    if wide == torch.float32:  # the sum is not rounded to the narrower of the two types
        assert torch.equal(ours["sum"], leaves["x"].float() + leaves["residual"].float())


@each_kind
def test_what_is_normed_is_the_sum_as_it_is_rounded_and_written(kind: Kind) -> None:
    leaves = inputs((70,), 24, residual=True, bias=True, types=TYPES["all in bf16"][0])
    normed, summed = called(norm_residual, leaves, kind)
    again, _ = norm_residual(summed, None, leaves["weight"], leaves["bias"], EPS, kind)
    assert float((normed != again).double().mean()) < 0.01  # with another layout a GPU may add a row up differently


@each_kind
def test_the_shares_of_many_programs_are_added_up(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    from mplug_triton import norm_launch

    monkeypatch.setattr(norm_launch, "PROGRAMS", 150)  # a tile of one row each, and more shares than are added at once
    assert_exact(inputs((150,), 1025, residual=True, bias=True), kind)


@each_kind
@with_and_without
def test_no_rows_give_no_rows_and_weights_a_gradient_of_zero(residual: bool, kind: Kind) -> None:
    found = outcome(norm_residual, inputs((2, 0), 24, residual, bias=residual), kind)
    for name, x in found.items():
        assert x.shape == ((24,) if name in ("gradient of weight", "gradient of bias") else (2, 0, 24))
        assert not x.any()


# The sum, which is x where there is nothing to add.


@each_kind
def test_x_may_be_used_beside_its_norm(kind: Kind) -> None:
    leaves = inputs((70,), 24, residual=False, bias=False)

    def gradients(norm: NormResidual, given: Leaves) -> tuple[Tensor, ...]:
        x = given["x"] * 1
        y, summed = called(norm, {**given, "x": x}, kind)
        return torch.autograd.grad((y * summed + x * x).sum(), list(given.values()))

    pairs = (norm_residual, leaves), (composition, exactly(leaves))
    ours, exact = (dict(zip(given, gradients(norm, given), strict=True)) for norm, given in pairs)
    assert_near(ours, exact, 3e-6)


@pytest.mark.parametrize("changed", [0, 1], ids=["x", "sum"])
def test_who_writes_into_x_or_the_sum_before_backward_gets_an_error(changed: int) -> None:
    leaves = inputs((3,), 24, residual=False, bias=False)
    x = leaves["x"] * 1
    y, summed = called(norm_residual, {**leaves, "x": x}, "rmsnorm")

    def write_and_go_back() -> None:
        (x, summed)[changed].add_(1)
        y.sum().backward()

    with pytest.raises(RuntimeError, match=r"modified inplace|modified by an inplace operation"):
        write_and_go_back()


# One operator each way.


VIEWS = {"aten.view.default", "aten.alias.default", "aten.detach.default", "aten.select.int"}
"""The gradients of weight and bias lie beside each other, hence the last."""
EACH_WAY = [["mplug_triton.norm.default"], ["mplug_triton.norm_gradient.default"]]


def without_views(*passes: list[str]) -> list[list[str]]:
    return [[name for name in names if name not in VIEWS] for names in passes]


@each_kind
@with_and_without
def test_one_operator_is_all_that_runs_each_way_and_without_a_residual_the_sum_is_x_and_no_copy(
    residual: bool, kind: Kind, operators_of: Operators
) -> None:
    leaves = inputs((2, 35), 24, residual, bias=True)
    outputs: list[Tensor] = []
    forward = operators_of(lambda: outputs.extend(called(norm_residual, leaves, kind)))
    upstream = [drawn(2, 35, 24, seed=5).to(DEVICE)] * 2
    backward = operators_of(lambda: torch.autograd.grad(outputs, list(leaves.values()), upstream))
    assert without_views(forward, backward) == EACH_WAY
    if not residual:
        assert outputs[1].data_ptr() == leaves["x"].data_ptr()
        assert torch.equal(outputs[1], leaves["x"])


def compiled(function: Callable[..., Any]) -> tuple[Callable[..., Any], list[list[str]]]:
    """A function traced into one graph, and the operators of the graphs of its forward and backward pass."""
    found: list[list[str]] = []

    def keep(graph: torch.fx.GraphModule, _: Any) -> Any:
        called = [node for node in graph.graph.nodes if node.op == "call_function"]
        found.append([str(node.target) for node in called if "getitem" not in str(node.target)])
        return make_boxed_func(graph.forward)

    torch.compiler.reset()
    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep)
    return torch.compile(function, backend=backend, fullgraph=True), found


@pytest.mark.filterwarnings("ignore")  # torch's own, as it traces
@each_kind
@with_and_without
def test_a_compiler_gets_one_operator_each_way_and_copies_nothing(residual: bool, kind: Kind) -> None:
    leaves = inputs((2, 35), 24, residual, bias=True)
    run, graphs = compiled(norm_residual)
    traced, eager = (outcome(norm, leaves, kind) for norm in (run, norm_residual))
    assert without_views(*graphs) == EACH_WAY
    for name, x in eager.items():
        assert torch.equal(traced[name], x), name
    if not residual:
        assert traced["sum"].data_ptr() == leaves["x"].data_ptr()


# On a GPU: Triton's interpreter rounds to bf16 by cutting off.


@pytest.mark.gpu
@pytest.mark.parametrize(("d", "residual", "kind"), list(product((96, 2048, 5120, 16384), (True, False), KINDS)))
def test_in_bf16_they_are_as_near_to_fp64_as_plain_torch(d: int, residual: bool, kind: Kind) -> None:
    types = dict.fromkeys(("x", "residual", "weight", "bias"), torch.bfloat16)
    leaves = inputs((2, 2048), d, residual, True, types)
    ours, plain = (outcome(norm, leaves, kind) for norm in (norm_residual, composition))
    for name, right in outcome(composition, exactly(leaves), kind).items():
        error, usual = (float((found[name].double() - right).norm() / right.norm()) for found in (ours, plain))
        assert error <= max(1.02 * usual, 2**-9), f"{name} is off by {error:.2e}, plain torch by {usual:.2e}"
