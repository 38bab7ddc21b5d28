"""Compile the units of a model, each as one graph. Functions import torch's compiler themselves: it imports slowly."""

import logging
import warnings
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

from torch import Tensor
from torch.fx import GraphModule

from mplug.errors import UsageError
from mplug.layout.plan import Plan, Unit
from mplug.model.model import Model
from mplug.run.run import Run
from mplug.run.toolchain import triton_builds
from mplug_compile.compiler_cache import repair_libraries
from mplug_compile.tracer import prepare_compiler

log = logging.getLogger("mplug")


SHAPES = 256
"""Maximum number of micro batch shapes for which a unit is compiled. Torch's limit is 8; a batch ramp-up has more."""


class UnitCompiler:
    """The class of the entry-point group 'mplug.compilers' (`mplug.model.unit_compiler.UnitCompiler`)."""

    def compile_units(self, run: Run, model: Model) -> None:
        """Compile each unit of this rank, with the backend that the config names, if it names one."""
        compile_units(model, compiler_of(run), run.config.trainer.tune_kernels)


def compiler_of(run: Run) -> str | None:
    """`run.compiler`, after a check that inductor can build kernels for a GPU.

    If it cannot, `trainer.compile=inductor` is a UsageError; 'auto' leaves the units eager and logs a warning. Also
    raises UsageError if `tune_kernels` and `deterministic` are both set.
    """
    setting = run.config.trainer.compile
    if run.config.trainer.tune_kernels and run.config.trainer.deterministic:
        raise UsageError(
            "trainer.tune_kernels=true and trainer.deterministic=true contradict each other: tuning chooses kernels by "
            "their measured time; set one of them to false"
        )
    if run.device.startswith("cuda") and setting in ("auto", "inductor") and not triton_builds():
        reason = "inductor needs Triton, a C compiler and Python's headers, and one of them is not installed"
        if setting == "inductor":
            raise UsageError(f"trainer.compile=inductor: {reason}; install it, or set trainer.compile=never")
        log.warning("units are not compiled: %s", reason)
    return run.compiler


def compile_units(model: Model, backend: str | None, tune_kernels: bool = False) -> None:
    """Compile each unit of this rank as one graph, without a break; blocks of one kind share the compiled code.

    Module hooks around a unit's call stay outside of the graph, and eager. The first call of a graph raises
    RuntimeError if an operator returns memory of its arguments.
    """
    for unit, run in compiled_units(model, model.own_units, backend, tune_kernels):
        setattr(model.module.get_submodule(unit.name), unit.method, run)


def compiled_units(
    model: Model,
    units: Iterable[Unit],
    backend: str | None,
    tune_kernels: bool = False,
    instead: Mapping[str, Callable[..., Any]] = MappingProxyType({}),
) -> list[tuple[Unit, Callable[..., Any]]]:
    """The units with compiled functions, which are compiled when they are first called; none without a backend.

    `instead` has functions of units, by name, that are compiled in the place of their methods.
    """
    if backend is None:
        return []
    import torch
    from torch._dynamo import config as dynamo
    from torch._inductor import config as inductor

    prepare_compiler()
    if backend == "inductor":
        repair_libraries()
    inductor.coordinate_descent_tuning = tune_kernels
    dynamo.recompile_limit = max(dynamo.recompile_limit, SHAPES)
    warnings.filterwarnings("ignore", "TensorFloat32 tensor cores", UserWarning)  # precision fp32 is deliberate
    named: dict[str, Any] = {"backend": _recomputing(backend), "fullgraph": True}
    varying = _varying_axes(model.plan)
    own = (
        (unit, instead.get(unit.name) or getattr(model.module.get_submodule(unit.name), unit.method)) for unit in units
    )
    return [
        (unit, _for_all_sizes(torch.compile(run, dynamic=False, **named), _varying_inputs(model.plan, unit, varying)))
        for unit, run in own
    ]


def _varying_axes(plan: Plan) -> set[str]:
    """The named axes whose sizes differ between micro batches: rows of streams, and segments of streams."""
    axes = set(plan.streams)
    axes |= {plan.context[name][1] for stream in plan.streams.values() for name in stream.lengths}
    of_streams = [unit for unit in (*plan.units, *plan.inference) if unit.sequence in plan.streams]
    return axes | {plan.activations[name][1] for unit in of_streams for name in unit.outputs}


def _varying_inputs(plan: Plan, unit: Unit, varying: set[str]) -> dict[str, list[int]]:
    """Each input of a unit in order, and its dimensions along axes that vary; empty if none does."""
    axes = {**plan.context, **plan.activations}
    inputs = (*unit.inputs, *unit.optional)
    found = {name: [dim for dim, axis in enumerate(axes.get(name, ())) if axis in varying] for name in inputs}
    return found if any(found.values()) else {}


def _for_all_sizes(compiled: Callable[..., Any], varying: dict[str, list[int]]) -> Callable[..., Any]:
    """A compiled unit whose one graph serves all sizes of the dimensions that vary.

    Only these dimensions become symbols. With `torch.compile(dynamic=True)` numbers of the modules would become symbols
    too, which operators do not take, and sizes that are equal by chance would have to stay equal.
    """
    if not varying:
        return compiled
    from torch._dynamo import maybe_mark_dynamic

    def call(*inputs: Tensor, **optional: Tensor) -> Any:
        for name, x in (*zip(varying, inputs, strict=False), *optional.items()):
            if varying[name]:
                maybe_mark_dynamic(x, varying[name])
        return compiled(*inputs, **optional)

    return call


def _recomputing(name: str) -> Callable[..., Any]:
    """The backend, set to recompute cheap inputs of a backward product (outputs of norms, activations).

    Torch saves them in the forward pass by default, because the product needs them in memory. Recomputed, they are in
    memory only during the product; saved, for all blocks at once: a third of the memory that blocks keep.
    """
    from torch._dynamo import lookup_backend
    from torch._functorch import config as functorch

    backend = lookup_backend(name)

    def compile_graph(graph: GraphModule, inputs: Any) -> Any:
        with functorch.patch(ban_recompute_materialized_backward=False):
            return backend(graph, inputs)

    return compile_graph


def compiled_graphs() -> int:
    """How many graphs this process has compiled so far."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])
