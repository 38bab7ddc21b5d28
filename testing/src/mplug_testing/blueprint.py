"""Checks of a model without memory: how it is built, and whether its plan describes it."""

from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mplug.errors import UsageError, listed, suggest
from mplug.layout.mesh import Mesh
from mplug.layout.plan import Plan, Segment, Unit
from mplug.model.memory import allocate
from mplug.model.model import Model
from mplug.model.slots.fill import sites
from mplug.model.slots.offers import Site
from mplug.run.run import Run
from mplug_nn import DotProductAttention
from mplug_nn.attention import DOT_PRODUCT, scaled_dot_product
from mplug_nn.specification import KNOWN
from mplug_testing.capabilities import is_specified
from mplug_testing.suite import Fault, naming_failures, require

FREE_BYTES = 1 << 20
"""Maximum bytes that a constructor may compute with: enough for constants, not for weights."""


def on_meta(run: Run) -> Model:
    """The model on the meta device, as the plugin builds it for a run."""
    with torch.device("meta"):
        model: Model = run.hooks.call.build_model(run=run)
    return model


def described(model: Model) -> str:
    """What a plan and its module state about what is computed, without FLOPs and names in published checkpoints."""
    plan, module = model.plan, model.module
    tensors = chain(module.named_parameters(), module.named_buffers())
    shapes = sorted((name, tuple(tensor.shape)) for name, tensor in tensors)
    stated = (plan.units, plan.inference, plan.parameters, plan.buffers, plan.context, plan.activations, plan.tied)
    return repr((stated, shapes))


def units_with_parameters(model: Model) -> list[str]:
    """The names of the units that have parameters, in order; a config can freeze these units."""
    names = [name for name, _ in model.module.named_parameters(remove_duplicate=False)]
    units = [unit.name for unit in model.plan.units]
    return [unit for unit in units if any(name.startswith(f"{unit}.") for name in names)]


class _Memory(TorchDispatchMode):
    """Counts the bytes of the tensors created in the block, except those on the meta device."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves(made) if isinstance(leaf, Tensor)]
        self.num_bytes += sum(tensor.nbytes for tensor in tensors if not tensor.is_meta)
        return made


def require_meta_build(run: Run) -> None:
    """Building creates tensors on the meta device only, allocates no memory and draws no random numbers."""
    before = torch.get_rng_state()
    with _Memory() as memory:
        module = on_meta(run).module
    for name, tensor in chain(module.named_parameters(), module.named_buffers()):
        require(tensor.is_meta, f"'{name}' is on {tensor.device}; build it on torch's current device, which is meta")
    require(
        torch.equal(before, torch.get_rng_state()),
        "build_model draws random numbers from torch's generator; describe initial values in the plan (Init), and the "
        "host draws them",
    )
    require(
        memory.num_bytes <= FREE_BYTES,
        f"build_model allocates {memory.num_bytes:,} bytes; build on the meta device, and the host allocates values",
    )
    for name, part in module.named_modules():
        for attribute, value in vars(part).items():
            require(
                not isinstance(value, Tensor),
                f"'{name}.{attribute}' is neither a parameter nor a buffer, so the host never gives it values; compute "
                f"it in the forward pass",
            )


def require_covered(model: Model) -> None:
    """The plan describes each parameter exactly once, and nothing else."""
    _require_ties(model)
    for name, _ in model.module.named_parameters(remove_duplicate=False):
        units = [unit.name for unit in model.plan.units if name.startswith(f"{unit.name}.")]
        require(units, f"parameter '{name}' is in no unit of the plan")
        require(len(units) == 1, f"parameter '{name}' is in the units {listed(units)}; units must not overlap")
    try:
        model.place(Mesh.of([], 1), None)
        allocate(model, 0, torch.device("meta"), torch.float32, seed=0)
    except (ValueError, UsageError) as error:
        raise Fault(str(error)) from None
    _require_known_axes(model.plan)
    _require_norms_over_heads(model)


def _require_ties(model: Model) -> None:
    names: dict[int, list[str]] = {}
    for name, parameter in model.module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    shared, stated = ({frozenset(group) for group in groups} for groups in (names.values(), model.plan.tied))
    for group in shared - stated:
        require(
            len(group) == 1,
            f"{listed(sorted(group))} are one parameter, and Plan.tied lacks them; add them to Plan.tied",
        )
    for group in stated - shared:
        raise Fault(f"Plan.tied ties {listed(sorted(group))}, and they are different parameters of the module")


def _require_known_axes(plan: Plan) -> None:
    """Every axis over which a parameter is broadcast exists in a parameter, an entry or an activation."""
    flowing = chain(*plan.context.values(), *plan.activations.values())
    known = {*flowing, *(axis for described in plan.parameters.values() for axis in _axes(described.dims))}
    for pattern, described in plan.parameters.items():
        for axis in described.over:
            require(
                axis in known,
                f"the plan declares that '{pattern}' is broadcast over '{axis}', and no parameter, entry or activation "
                f"has this axis{suggest(axis, known)}",
            )
    for pattern, buffer in plan.buffers.items():
        for axis in buffer.over:
            require(
                axis in known,
                f"the plan declares that '{pattern}' is counted over '{axis}', and no parameter, entry or activation "
                f"has this axis{suggest(axis, known)}",
            )


def _require_norms_over_heads(model: Model) -> None:
    """All heads share one QK-norm. Strategies that divide heads learn this only from the plan."""
    divisible = {axis for described in model.plan.parameters.values() for axis in _axes(described.dims)}
    for name, part in model.module.named_modules():
        if not isinstance(part, DotProductAttention) or part.q_norm is None:
            continue
        for norm, axis in (("q_norm", "heads"), ("k_norm", "kv_heads")):
            over = model.placement_of(f"{name}.{norm}").parameter.over
            require(
                axis in over or axis not in divisible,
                f"the plan declares that '{name}.{norm}' is broadcast over {listed(over)}; add {axis} to its `over`",
            )


def _axes(dims: Iterable[str | Segment | tuple[Segment, ...]]) -> Iterable[str]:
    for dim in dims:
        if isinstance(dim, str):
            yield dim
        else:
            yield from (segment.axis for segment in (dim if isinstance(dim, tuple) else (dim,)))


def other_functions(site: Site) -> str:
    """The needs of a site's core that `mplug_nn` does not define: names of other functions, or an empty string."""
    of_its_specification: frozenset[str] = getattr(getattr(site.module, "spec", None), "needs", frozenset())
    return ", ".join(sorted(site.needs - KNOWN - of_its_specification))


def require_own_cores(model: Model) -> None:
    """A module's own core computes what its specification says, or its sites need the core's function by name.

    If the sites need nothing beyond the specification, any kernel may replace the core, which would change the model.
    """
    for site in sites(model.module):
        if site.slot != "Attention.core" or not hasattr(site.module, "spec") or other_functions(site):
            continue
        core: Callable[..., Tensor] = site.module.core
        if core not in (DOT_PRODUCT, scaled_dot_product):
            with naming_failures(f"the attention core of '{site.name}'"):
                is_sound = is_specified(core, site.module)
            require(
                is_sound,
                f"the attention core of '{site.name}' computes another function than its specification, and the site "
                f"has no need for this function, so a kernel could replace it by softmax attention; override 'needs' "
                f"so that it names the function of the core",
            )


def require_fitting_units(model: Model) -> None:
    """The training units lead from the context to a loss, the inference units to logits."""
    plan = model.plan
    names = [unit.name for unit in plan.units]
    for name in names:
        require(names.count(name) == 1, f"the plan has {names.count(name)} units '{name}'; each unit must run once")
    _require_chain(model, plan.units, ("loss", "num_targets"))
    if plan.inference:
        _require_chain(model, plan.inference, ("logits",))
    for unit in plan.inference:
        require(
            unit.name in names, f"unit '{unit.name}' of Plan.inference is not in Plan.units; inference units must be"
        )


def _require_chain(model: Model, units: tuple[Unit, ...], ends: tuple[str, ...]) -> None:
    require(units, "the plan has no units")
    known = dict.fromkeys(model.plan.context)
    for unit in units:
        _require_callable(model, unit)
        for name in unit.inputs:
            require(
                name in known,
                f"unit '{unit.name}' takes '{name}', which is neither an entry of the plan's context nor an output of "
                f"an earlier unit{suggest(name, known)}",
            )
        for name in unit.optional:
            require(
                name in model.plan.context,
                f"unit '{unit.name}' has the optional input '{name}', and the plan's context lacks its axes"
                f"{suggest(name, model.plan.context)}",
            )
        for name in unit.outputs:
            require(
                name in model.plan.activations,
                f"unit '{unit.name}' returns '{name}', and the plan's activations lack its axes",
            )
        known |= dict.fromkeys(unit.outputs)
    last = units[-1]
    require(
        set(ends) <= set(last.outputs),
        f"the last unit, '{last.name}', returns {listed(last.outputs)}; it must return {listed(ends)}",
    )


def _require_callable(model: Model, unit: Unit) -> None:
    try:
        part = model.module.get_submodule(unit.name)
    except AttributeError:
        raise Fault(f"unit '{unit.name}' of the plan is not a submodule of the model") from None
    require(
        callable(getattr(part, unit.method, None)),
        f"unit '{unit.name}' of the plan has no method '{unit.method}'",
    )
