"""QuACK: what it claims, and what is done with its kernels. Their numbers are a GPU's to show.

On a CPU stand-ins in plain torch take the kernels' place. T tokens, D embed, F mlp.
"""

import inspect
import itertools
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any
from unittest.mock import patch

import mplug_quack.needs
import pytest
import torch
from mplug_quack.dense import PRODUCTS
from mplug_quack.grouped import QuackGroups
from mplug_quack.limits import supports_experts
from mplug_quack.limits import supports_mlp as supports
from mplug_quack.mlp import CORES, KINDS, core
from mplug_quack.needs import missing
from mplug_quack.rows import ALIGNED
from offers import run
from torch import Tensor
from torch.nn import functional as F

from mplug import Offer, Site
from mplug.errors import UsageError
from mplug.model.build import build_model
from mplug_nn import MLP, Experts, GroupedProduct, Operand, Sink, Weights, normal_tail
from mplug_nn.grouped import PLAIN_GROUPED, apply_grouped
from mplug_nn.linear import PLAIN, multiply
from mplug_nn.mlp import activation
from mplug_schedules.weight_gradients import WeightGradients
from mplug_testing import KernelSuite
from mplug_testing.delayed_core_checks import later_core_fault
from mplug_testing.delayed_gradient_checks import later_fault
from mplug_testing.harness import tiny_run
from mplug_testing.kernel_cases import Case, cases
from mplug_testing.kernel_checks import Trial

on_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(find_spec("quack") is None, reason="QuACK is not installed; install 'mplug-quack[quack]'"),
    pytest.mark.filterwarnings("ignore"),  # those of QuACK and of torch's tracer are not the supplier's
]


class TestQuack(KernelSuite):
    plugin = "quack"
    dtypes = ("bf16",)
    settings = {"trainer.device": "cuda"}
    pytestmark = on_gpu


# What it claims.


def site(kind: str = "gelu", d: int = 32, f: int = 128, bias: bool = False, *needs: str) -> Site:
    with torch.device("meta"):
        return Site("blocks.*.mlp", "MLP.core", MLP(d, f, kind, bias), "blocks.0.mlp", frozenset(needs))  # type: ignore[arg-type]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Makes the machine one with, or without, QuACK, and such a GPU."""

    def become(installed: bool = True, capability: tuple[int, int] = (9, 0), broken: str = "") -> None:
        def version(name: str) -> str:
            if not installed:
                raise mplug_quack.needs.PackageNotFoundError(name)
            return "0.6.5"

        def import_module(name: str) -> None:
            if broken:
                raise ImportError(broken)

        missing.cache_clear()
        monkeypatch.setattr(mplug_quack.needs, "version", version)
        monkeypatch.setattr(mplug_quack.needs, "import_module", import_module)
        monkeypatch.setattr("torch.cuda.get_device_capability", lambda: capability)

    yield become
    missing.cache_clear()


def test_it_serves_gelu_in_bf16_on_hopper_with_a_bias_and_without(machine: Callable[..., None]) -> None:
    machine()
    assert [supports(site(kind, bias=bias), run()) for kind in KINDS for bias in (False, True)] == [True] * 4


@pytest.mark.parametrize(
    ("changes", "at", "during", "words"),
    [
        (
            {},
            site("swiglu"),
            run(),
            "supports the activations gelu and gelu_tanh, and this site's activation is swiglu",
        ),
        ({}, site(), run("cpu"), "it needs a Hopper GPU, and this run is on the CPU"),
        ({}, site(), run(precision="fp32"), "it computes in bf16, and trainer.precision=fp32 computes in float32"),
        ({}, site(d=36), run(), f"multiples of {ALIGNED} as widths, and this MLP has widths 36 and 128"),
        ({}, site(f=100), run(), f"multiples of {ALIGNED} as widths, and this MLP has widths 32 and 100"),
        ({}, site("gelu", 32, 128, False, "ringo"), run(), "it does not offer ringo"),
        ({"installed": False}, site(), run(), "QuACK is not installed; install 'mplug-quack[quack]'"),
        ({"capability": (8, 0)}, site(), run(), "it supports compute capability 9.0, and this GPU has 8.0"),
        ({"broken": "no cutlass\nat all"}, site(), run(), "QuACK is installed, and its import fails: no cutlass"),
    ],
)
def test_what_it_cannot_serve_is_refused_with_the_reason(
    machine: Callable[..., None], changes: dict[str, Any], at: Site, during: Any, words: str
) -> None:
    machine(**changes)
    answer = str(Offer({"MLP.core": None}, supports).answer(at, during))
    assert words in answer
    assert "\n" not in answer


@pytest.mark.skipif(torch.cuda.is_available(), reason="it is for machines that cannot run it")
def test_a_run_that_names_it_without_a_gpu_is_refused_with_the_reason() -> None:
    with pytest.raises(UsageError, match=r"kernels/quack cannot serve MLP\.core of 'blocks\.\*\.mlp': it needs a Hop"):
        build_model(tiny_run({"kernels.mlp": "quack"}))


# What is done with the kernels.


def product(a: Tensor, b: Tensor) -> Tensor:
    return a.float() @ b.float()


def up(kind: str) -> Callable[..., None]:
    def write(x: Tensor, weight: Tensor, out: dict[str, Tensor], tuned: bool, bias: Tensor | None = None) -> None:
        h = product(x, weight) if bias is None else product(x, weight) + bias.float()
        out["D"].copy_(h)
        out["y"].copy_(activation(h, None, kind))  # type: ignore[arg-type]

    return write


def down(kind: str) -> Callable[..., None]:
    def write(grad_y: Tensor, weight: Tensor, h: Tensor, out: dict[str, Tensor], tuned: bool) -> None:
        with torch.enable_grad():
            leaf = h.float().detach().requires_grad_()
            y = activation(leaf, None, kind)  # type: ignore[arg-type]
            (grad,) = torch.autograd.grad(y, leaf, product(grad_y, weight))
        out["D"].copy_(grad)
        out["y"].copy_(y.detach())

    return write


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels' module, in plain torch."""
    module = ModuleType("mplug_quack.epilogues")
    module.UP = {(kind, bias): up(kind) for kind in KINDS for bias in (False, True)}  # type: ignore[attr-defined]
    module.DOWN = {kind: down(kind) for kind in KINDS}  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mplug_quack.epilogues", module)


def served() -> list[Case]:
    """The cases of the slot that it says it can serve, on a machine that can run it."""
    with patch("mplug_quack.limits.missing", return_value=""):
        return [
            case
            for case in cases()
            if case.slots == ("MLP.core",)
            and supports(Site("blocks.*.mlp", "MLP.core", case.module, "blocks.0.mlp"), run()) is True
        ]


def gemm(  # type: ignore[no-untyped-def]
    a, b, y, c, semaphore, *tile, pingpong, cu_seqlens_m=None, cu_seqlens_k=None, add_to_output=False
) -> None:
    """`quack.gemm.gemm`, dense or for groups of rows or of columns, with what it requires of strides."""
    assert c is None
    assert semaphore is None
    if cu_seqlens_m is None and cu_seqlens_k is None:
        assert [one.shape[0] for one in (a, b, y)] == [1, 1, 1]
        assert all(1 in one.stride()[1:] for one in (a, b))
        own = product(a[0], b[0].t())
        y[0] = y[0] + own if add_to_output else own
        return
    bounds = (cu_seqlens_k if cu_seqlens_m is None else cu_seqlens_m).tolist()
    for group, (start, stop) in enumerate(itertools.pairwise(bounds)):
        if cu_seqlens_m is not None:
            assert (a.stride(-1), y.stride(-1)) == (1, 1)
            y[start:stop] = product(a[start:stop], b[group].t())
        else:
            assert (a.stride(-2), b.stride(-2)) == (1, 1)
            own = product(a[:, start:stop], b[:, start:stop].t())
            y[group] = y[group] + own if add_to_output else own


@pytest.fixture
def gemm_stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("quack.gemm")
    module.gemm = gemm  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "quack", ModuleType("quack"))
    monkeypatch.setitem(sys.modules, "quack.gemm", module)


OF_PRODUCTS = [*(("fused", case) for case in served()), *(("all", case) for case in served()[:2])]


@pytest.mark.parametrize(("products", "case"), OF_PRODUCTS, ids=lambda one: getattr(one, "name", one))
@pytest.mark.usefixtures("stand_ins", "gemm_stand_in")
def test_values_gradients_and_sinks_are_those_of_plain_torch_also_in_one_graph(products: str, case: Case) -> None:
    trial = Trial(case, {"MLP.core": CORES[products]}, torch.bfloat16, "cpu", case.name)
    assert trial.values_fault(4.0) == ""
    assert trial.strided_fault(4.0) == ""
    assert trial.in_place_fault() == ""
    assert trial.repeated_fault() == ""
    if case in served()[:3]:
        assert trial.compiled_fault(4.0) == ""


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).bfloat16()


def unused(x: Tensor) -> Tensor:
    raise AssertionError("the narrower slots are called")


@pytest.mark.usefixtures("stand_ins")
def test_a_part_of_an_mlp_of_an_odd_width_goes_by_the_narrower_slots() -> None:
    x, up, down = drawn(2, 5, 32), Weights(drawn(12, 32)), Weights(drawn(32, 12))

    def composed(x: Tensor) -> Tensor:
        return multiply(F.gelu(multiply(x, up, PLAIN)), down, PLAIN)

    assert torch.equal(core(x, up, None, down, "gelu", composed), composed(x))


@pytest.mark.usefixtures("stand_ins")
def test_backward_keeps_what_the_activation_was_of_and_a_weight_that_does_not_learn_gets_no_gradient() -> None:
    x, bias, up, down = (drawn(*shape).requires_grad_() for shape in ((3, 32), (64,), (64, 32), (32, 64)))
    sink, stale, kept = torch.ones(64, 32), torch.zeros((), dtype=torch.bool), list[tuple[int, ...]]()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(tuple(x.shape)) or x, lambda x: x):
        core(x, Weights(up), None, Weights(down), "gelu", unused)
    assert sorted(kept) == [(3, 32), (3, 64), (32, 64), (64, 32)]
    up.requires_grad_(False)
    core(x, Weights(up, sink, stale), bias, Weights(down), "gelu", unused).sum().backward()
    assert up.grad is None
    assert torch.equal(sink, torch.ones(64, 32))
    assert all(one.grad is not None and bool(one.grad.any()) for one in (x, bias, down))


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("kind", KINDS)
def test_a_core_leaves_the_operands_of_its_weight_gradients_also_in_one_graph(kind: str) -> None:
    assert [later_core_fault(CORES["fused"], kind, torch.bfloat16, "cpu", compiles) for compiles in (False, True)] == [
        "",
        "",
    ]


@pytest.mark.usefixtures("stand_ins")
def test_the_weight_gradients_of_a_whole_model_can_come_later() -> None:
    from mplug.training.assembly import build

    parts = build(tiny_run({"model.num_layers": 2, "trainer.precision": "bf16", "trainer.micro_batch_size": 1}))
    model, sinks = parts.model, parts.model.sinks
    for part in model.module.modules():
        if isinstance(part, MLP):
            part.core = CORES["fused"]
    later = WeightGradients(model)
    entries = {**next(iter(parts.train_loader.take(1))), "keys": torch.arange(1)}

    def gradients(postponed: bool) -> dict[str, Tensor]:
        sinks.begin_step()
        sinks.expect_last()
        with later.postponing(entries) if postponed else nullcontext() as rest:
            loss, _ = model.loss(entries)
        with nullcontext() if rest is None else rest.backward():
            loss.backward()
        waiting = {name for name, sink in sinks.items() if not sink.final}
        assert waiting >= {name for name in sinks if ".mlp." in name and "weight" in name} if postponed else not waiting
        if rest is not None:
            rest.compute()
        sinks.finish()
        return {name: sink.buffer.clone() for name, sink in sinks.items()}

    now, found = gradients(False), gradients(True)
    assert [name for name, gradient in now.items() if not torch.equal(found[name], gradient)] == []
    assert all(bool(gradient.any()) for gradient in now.values())


# Experts. M rows, e groups, I input, O output.


def by(groups: GroupedProduct, counts: list[int], aligned: bool = True) -> list[Tensor]:
    """The results of two passes of products by `groups`: outputs, gradients of rows, and the weights' sum."""
    rows, weight, grad = drawn(24, 16).requires_grad_(), drawn(len(counts), 32, 16), drawn(24, 32)
    room = torch.full((weight.numel() + 1,), 7.0)
    total, stale = room[0 if aligned else 1 :][: weight.numel()].view_as(weight), torch.ones((), dtype=torch.bool)
    weight.requires_grad_()
    for _ in range(2):
        y = apply_grouped(groups, rows, torch.tensor(counts), Weights(weight, total, stale))
        y.backward(torch.where(torch.arange(24)[:, None] < sum(counts), grad, 0))
    assert rows.grad is not None
    held = sum(counts)
    return [y[:held].detach(), rows.grad[:held], total]


@pytest.mark.parametrize("counts", [[5, 3, 7, 9], [0, 24, 0, 0], [1, 0, 0, 2], [0, 0, 0, 0], [3, 0, 21, 0]], ids=str)
@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.usefixtures("gemm_stand_in")
def test_products_of_groups_and_their_gradients_are_those_of_plain_torch(counts: list[int], aligned: bool) -> None:
    for ours, plain in zip(by(QuackGroups(), counts, aligned), by(PLAIN_GROUPED, counts), strict=True):
        torch.testing.assert_close(ours, plain, rtol=2e-2, atol=1e-1)


@pytest.mark.usefixtures("gemm_stand_in")
def test_no_row_at_all_gives_no_product_and_a_weights_gradient_of_0() -> None:
    total, stale = torch.full((2, 32, 16), 7.0), torch.ones((), dtype=torch.bool)
    rows, weight = drawn(0, 16).requires_grad_(), drawn(2, 32, 16).requires_grad_()
    y = apply_grouped(QuackGroups(), rows, torch.zeros(2, dtype=torch.int64), Weights(weight, total, stale))
    y.sum().backward()
    assert y.shape == (0, 32)
    assert not total.any()
    assert not stale


@pytest.mark.usefixtures("gemm_stand_in")
def test_a_pipeline_may_compute_the_gradients_of_groups_later() -> None:
    offer = Offer({"Experts.product": QuackGroups()})
    assert later_fault(offer, "Experts.product", torch.bfloat16, "cpu", compiles=True) == ""


def experts(d: int = 32, f: int = 128) -> Site:
    with torch.device("meta"):
        return Site("blocks.*.experts", "Experts.product", Experts(d, f, 4, "swiglu"), "blocks.0.experts")


@pytest.mark.parametrize(
    ("at", "during", "words"),
    [
        (experts(), run("cpu"), "it needs a Hopper GPU, and this run is on the CPU"),
        (experts(), run(precision="fp32"), "it computes in bf16, and trainer.precision=fp32 computes in float32"),
        (experts(f=100), run(), "multiples of 8 as widths, and a rank's part of these experts has widths 32, 200 and"),
    ],
)
def test_experts_that_it_cannot_serve_are_refused_with_the_reason(
    machine: Callable[..., None], at: Site, during: Any, words: str
) -> None:
    machine()
    assert supports_experts(experts(), run()) is True
    assert words in str(Offer({"Experts.product": None}, supports_experts).answer(at, during))


@pytest.mark.gpu
@pytest.mark.skipif(find_spec("quack") is None, reason="QuACK is not installed; install 'mplug-quack[quack]'")
@pytest.mark.parametrize("counts", [[50, 300, 7, 155], [0, 512, 0, 0], [1, 0, 0, 2], [0, 0, 0, 0]], ids=str)
def test_on_a_gpu_quacks_products_of_groups_are_each_groups_own(counts: list[int]) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    rows, weight, grad = (
        torch.randn(shape, generator=generator, device="cuda").bfloat16()
        for shape in ((512, 64), (4, 96, 64), (512, 96))
    )
    ends = torch.tensor(counts).cumsum(0).to("cuda", torch.int32)
    operand, total, stale = (
        Operand(weight),
        torch.full((4, 96, 64), 7.0, device="cuda"),
        torch.ones((), dtype=torch.bool),
    )
    groups = QuackGroups()
    for _ in range(2):
        y, saved = groups.forward(rows, operand, ends, {})
        grad_rows, operands = groups.dgrad(grad, operand, saved, ends, {}, True)
        groups.wgrad(operands, Sink(total, stale), ends, {})
    assert grad_rows is not None
    start = 0
    for group, count in enumerate(counts):
        own, matrix = slice(start, start + count), weight[group].float()
        torch.testing.assert_close(y[own].float(), rows[own].float() @ matrix.T, rtol=1e-2, atol=1e-1)
        torch.testing.assert_close(grad_rows[own].float(), grad[own].float() @ matrix, rtol=1e-2, atol=1e-1)
        torch.testing.assert_close(total[group], 2 * grad[own].float().T @ rows[own].float(), rtol=1e-3, atol=1e-2)
        start += count


@pytest.mark.gpu
@pytest.mark.skipif(find_spec("quack") is None, reason="QuACK is not installed; install 'mplug-quack[quack]'")
def test_on_a_gpu_quacks_dense_products_are_those_of_torch_in_fp32() -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    rows, weight, grad = (
        torch.randn(shape, generator=generator, device="cuda").bfloat16() for shape in ((512, 64), (96, 64), (512, 96))
    )
    total, stale = torch.full((96, 64), 7.0, device="cuda"), torch.ones((), dtype=torch.bool)
    multiply_by, gradient = PRODUCTS["all"]
    for _ in range(2):
        y, grad_rows = multiply_by(rows, weight, True), multiply_by(grad, weight, False)
        assert gradient(grad, rows, Weights(weight, total, stale)) is None
    torch.testing.assert_close(y.float(), rows.float() @ weight.float().T, rtol=1e-2, atol=1e-1)
    torch.testing.assert_close(grad_rows.float(), grad.float() @ weight.float(), rtol=1e-2, atol=1e-1)
    torch.testing.assert_close(total, 2 * grad.float().T @ rows.float(), rtol=1e-3, atol=1e-2)


def test_epilogues_refer_to_functions_of_quack_and_cutlass_through_their_modules_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """QuACK cannot identify what CUTLASS's decorators refer to (DSL 4.8.0 and later, outside of site-packages)."""
    made: list[FunctionType] = []

    def gemm_epilogue(**options: Any) -> Callable[[FunctionType], FunctionType]:
        return lambda epilogue: made.append(epilogue) or epilogue  # type: ignore[func-returns-value]

    gelu = (lambda x: x).__code__, {"__name__": "quack.activation"}
    contents: dict[str, dict[str, Any]] = {
        "cutlass": {},
        "cutlass.cute": {},
        "quack": {},
        "quack.activation": {name: FunctionType(*gelu) for name in ("gelu_tanh_approx", "dgelu_tanh_approx")},
        "quack.cache": {"EXTRA_SOURCE_DIRS": []},
        "quack.epilogue": {"gemm_epilogue": gemm_epilogue},
        "quack.epilogue.ops": {"RowVecLoad": lambda name: name},
    }
    for name, content in contents.items():
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
        if "." in name:
            setattr(sys.modules[name.rpartition(".")[0]], name.rpartition(".")[2], module)
    monkeypatch.delitem(sys.modules, "mplug_quack.epilogues", raising=False)
    epilogues = import_module("mplug_quack.epilogues")
    monkeypatch.delitem(sys.modules, "mplug_quack.epilogues")
    reached, unread = [], made[:]
    for function in unread:  # it grows
        reached.append(function.__globals__["__name__"])
        referred = inspect.getclosurevars(function).globals.values()
        unread += [one for one in referred if inspect.isfunction(one) and one not in unread]
    assert len(made) == len(epilogues.UP) + len(epilogues.DOWN)
    assert set(reached) == {"mplug_quack.epilogues", "mplug_nn.normal_tail"}
    assert contents["quack.cache"]["EXTRA_SOURCE_DIRS"] == [
        Path(mplug_quack.__file__).parent,
        Path(normal_tail.__file__).parent,
    ]


@pytest.mark.wide("suites")
def test_neither_importing_it_nor_asking_it_imports_quack() -> None:
    code = (
        "import sys; sys.modules['quack'] = sys.modules['cutlass'] = None; "
        "from mplug_quack import Quack; Quack(Quack.Config()).offer()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
