"""Units compiled as one graph each: the numbers of an eager run under every layout, and nothing compiled twice."""

import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mplug import Flops, Plan, Unit
from mplug_testing import run_workers
from mplug_testing.harness import Trace, difference, train_steps

Counts = dict[str, int]
Gradients = dict[str, tuple[Any, Any]]


def compiled(settings: dict[str, object]) -> tuple[Trace, Counts]:
    """Be one rank of a run; returns what it saw, and what torch counted while it compiled."""
    from torch._dynamo.utils import counters

    warnings.simplefilter("ignore")  # torch's own, as it traces
    trace = train_steps(settings)
    return trace, {**counters["stats"], "graph breaks": sum(counters["graph_break"].values())}


KEYED = {"model.dropout": 0.1}
FUSED = {**KEYED, "model.attention_dropout": 0.1}
"""What is the same under any layout, and what is where neither heads nor samples are divided."""


@pytest.fixture(scope="module")
def eager() -> list[Trace]:
    return run_workers(1, trained, [KEYED, FUSED])[0]


@pytest.fixture(scope="module")
def in_one_process() -> tuple[float, Gradients]:
    """What `kept_by_a_block` and `gradients` find, in one process that imports the compiler once."""
    return run_workers(1, compiled_alone)[0]


def compiled_alone() -> tuple[float, Gradients]:
    return kept_by_a_block(), gradients()


def trained(runs: list[dict[str, object]]) -> list[Trace]:
    return [train_steps(settings) for settings in runs]


WIDE = pytest.mark.wide("layouts")
LAYOUTS = [
    pytest.param("", 1, 6, FUSED, marks=WIDE),
    pytest.param("pp2", 2, 4, FUSED, marks=WIDE),
    pytest.param("dp2", 2, 6, KEYED, marks=WIDE),
]


@pytest.mark.parametrize(("layout", "world_size", "graphs", "drops"), LAYOUTS)
def test_a_compiled_run_is_the_eager_run_of_one_process(
    eager: list[Trace], layout: str, world_size: int, graphs: int, drops: dict[str, object]
) -> None:
    """Three kinds of units (a stage of two has two), each traced for training and for evaluation, and never again."""
    settings = {**drops, "parallel.layout": layout, "trainer.compile": "aot_eager"}
    found = run_workers(world_size, compiled, settings)
    assert difference([trace for trace, _ in found], eager[drops is FUSED]) == ""
    for _, counts in found:
        assert counts["unique_graphs"] == graphs
        assert counts["graph breaks"] == 0


@pytest.mark.wide("compile")
def test_blocks_of_one_kind_share_what_is_compiled() -> None:
    settings = {"model.num_layers": 8, "trainer.compile": "aot_eager"}
    assert run_workers(1, compiled, settings)[0][1]["unique_graphs"] == 6


def kept_by_a_block() -> float:
    """What the second block keeps for its backward pass, as a multiple of the residual stream [B, S, D]."""
    from torch.autograd.graph import saved_tensors_hooks

    from mplug.training.assembly import build
    from mplug_compile.compilation import compile_units
    from mplug_testing.harness import tiny_run

    warnings.simplefilter("ignore")
    run = tiny_run({"model.num_layers": 2, "model.num_kv_heads": 4, "model.qk_norm": False, "trainer.seq_length": 64})
    parts = build(run)
    compile_units(parts.model, "aot_eager_decomp_partition")  # partitions as inductor does, and needs no C++ compiler
    own = {tensor.data_ptr() for sink in parts.model.sinks.values() for tensor in (sink.parameter, sink.buffer)}
    kept: dict[int, int] = {}
    inside = [False]
    block = parts.model.module.get_submodule("blocks.1")
    block.register_forward_pre_hook(lambda *_: inside.__setitem__(0, True))
    block.register_forward_hook(lambda *_: inside.__setitem__(0, False))

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if inside[0] and tensor.data_ptr() not in own:
            kept[tensor.data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    size, length, width = run.micro_batch_size, run.config.trainer.seq_length, run.config.model.hidden_size
    batch = next(iter(parts.train_loader.take(size)))
    with saved_tensors_hooks(keep, lambda tensor: tensor):
        parts.model.loss(parts.stepper.entries(batch, 1))
    return sum(kept.values()) / (4 * size * length * width)


@pytest.mark.wide("compile")
def test_a_compiled_block_keeps_no_norms_outputs_and_no_activations_that_it_can_compute_again(
    in_one_process: tuple[float, Gradients],
) -> None:
    """The stream, q, k, v (in the packed projection), what attention gives, its projection, and the MLP's 4 wide."""
    assert in_one_process[0] < 13


def units_of_many_shapes() -> int:
    """The graphs of a model that saw four sizes of micro batch, where torch by itself allows two.

    A hook of the model opens a file, which no compiler can trace.
    """
    from mplug.training.assembly import build
    from mplug_compile.compilation import compiled_graphs
    from mplug_testing.harness import tiny_run

    warnings.simplefilter("ignore")
    torch._dynamo.config.recompile_limit = 2
    whole = {"trainer.micro_batch_size": None, "trainer.global_batch_size": 16}
    parts = build(tiny_run({"trainer.compile": "aot_eager", "model.num_layers": 1, "trainer.seq_length": 8, **whole}))
    opened: list[None] = []
    block = parts.model.module.get_submodule("blocks.0")
    block.register_forward_pre_hook(lambda *_: opened.append(open(__file__).close()))
    for size in range(1, 5):
        batch = next(iter(parts.train_loader.take(size)))
        parts.model.loss(parts.stepper.entries(batch, 1))
    assert len(opened) == 4
    return compiled_graphs()


@pytest.mark.wide("compile")
def test_more_sizes_of_micro_batch_than_torch_allows_by_itself_compile_and_hooks_stay_eager() -> None:
    assert run_workers(1, units_of_many_shapes)[0] == 12, "three kinds of units, four sizes each"


# Autograd functions and operators, of which torch before 2.13 compiles some to wrong gradients.


def function(forward: Callable[..., Any], backward: Callable[..., Any] = lambda _, grad: grad * 3) -> Any:
    """An autograd function; the gradient of 3 x, unless another is given."""
    methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    return type("Function", (torch.autograd.Function,), methods).apply


def contiguous(ctx: Any, x: Tensor) -> Tensor:
    y = x * 3
    ctx.save_for_backward(y)
    return y.contiguous()


def in_place(_: Any, x: Tensor) -> Tensor:
    y = x.clone()
    y *= 3
    return y


def product(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
    ctx.save_for_backward(x, weight)
    return x * weight


def product_gradients(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    x, weight = ctx.saved_tensors
    return grad * weight, grad * x


def dirty(ctx: Any, x: Tensor) -> Tensor:
    ctx.mark_dirty(x.mul_(3))
    return x


def changed(x: Tensor) -> Tensor:
    dirtied(x)
    return x


tripled, dirtied, weighted = function(lambda _, x: x * 3), function(dirty), function(product, product_gradients)
both = function(lambda _, x: ((x * 3).contiguous(), (x * 2).to(x.dtype)), lambda _, grad, other: grad * 3 + other * 2)
offset = function(lambda _, x, one, other: x * 3 + one - other, lambda _, grad: (grad * 3, None, None))


def returned(x: Tensor) -> Tensor:
    return x


CORRECT: dict[str, Callable[[Tensor], Any]] = {
    "a new tensor": tripled,
    "converted to its own type": function(lambda _, x: (x * 3).to(x.dtype)),
    "made contiguous": function(contiguous),
    "changed in place": function(in_place),
    "two of these": lambda x: both(x)[0] * both(x)[1],
    "a tensor and its view": lambda x: weighted(x, x.view_as(x)),
}
REFUSED: dict[str, Callable[[Tensor], Any]] = {
    "one tensor twice": lambda x: weighted(x, x),
    "a dirty argument": changed,
    "indices twice": lambda x: offset(x, *[torch.arange(3)] * 2),
}


def gradients() -> Gradients:
    """For each function: the gradient of an eager unit, and that of a compiled unit or the error of compiling it."""
    from mplug_compile.compilation import compile_units
    from mplug_nn import fake, operator

    warnings.simplefilter("ignore")  # torch's own, as it traces
    aliasing = operator("mplug_tests::returned")(returned)
    fake("mplug_tests::returned")(torch.empty_like)
    functions = {**CORRECT, **REFUSED, "an operator that returns its argument": lambda x: tripled(aliasing(x))}
    found: Gradients = {}
    for name, function in functions.items():
        unit: Any = nn.Identity()
        unit.forward = lambda x, function=function: function(x * 1.0).square().sum()
        eager, compiled = (torch.arange(6.0).view(2, 3).requires_grad_() for _ in range(2))
        if "operator" not in name:  # it has no derivative
            unit(eager).backward()
        parts = (Unit("unit", ("x",), ("y",)),)
        plan = Plan(parts, parameters={}, context={}, activations={}, flops=Flops(0, 0))
        model: Any = SimpleNamespace(module=nn.ModuleDict({"unit": unit}), own_units=parts, plan=plan)
        compile_units(model, "aot_eager")
        try:
            unit(compiled).backward()
        except RuntimeError as error:
            found[name] = eager.grad, str(error)
        else:
            found[name] = eager.grad, compiled.grad
    return found


def test_a_compiled_autograd_function_has_its_eager_gradient_or_is_refused(
    in_one_process: tuple[float, Gradients],
) -> None:
    """Torch 2.11 compiles all of them but the first and the views to wrong gradients; 2.12 those of `REFUSED`."""
    found = in_one_process[1]
    for name in CORRECT:
        torch.testing.assert_close(found[name][1], found[name][0], msg=name)
    assert "same tensor" in found["one tensor twice"][1]
    for name, reason in {"a dirty argument": "mark_dirty", "indices twice": "same tensor"}.items():
        eager, compiled = found[name]  # each of these is refused under some versions, and correct under the others
        assert reason in compiled if isinstance(compiled, str) else torch.equal(compiled, eager)
    assert "alias" in str(found["an operator that returns its argument"][1])


def test_auto_leaves_units_eager_where_nothing_can_build_kernels(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from mplug import UsageError
    from mplug_compile.compilation import compiler_of
    from mplug_testing.harness import tiny_run

    wanted = {name: tiny_run({"trainer.compile": name}) for name in ("auto", "inductor", "never")}
    for run in wanted.values():
        run.device = "cuda"
    for module in ("mplug.run.run", "mplug_compile.compilation"):
        monkeypatch.setattr(f"{module}.triton_builds", lambda: True)
    assert [compiler_of(run) for run in wanted.values()] == ["inductor", "inductor", None]
    for module in ("mplug.run.run", "mplug_compile.compilation"):
        monkeypatch.setattr(f"{module}.triton_builds", lambda: False)
    assert compiler_of(wanted["auto"]) is None
    assert "units are not compiled" in caplog.text
    with pytest.raises(UsageError, match=r"trainer.compile=inductor: .*; install it, or set trainer.compile=never"):
        compiler_of(wanted["inductor"])
    wanted["auto"].device = "cpu"
    assert compiler_of(wanted["auto"]) is None
