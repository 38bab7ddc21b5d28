"""How the plan of a model changes when plugins attach modules to the model or freeze its parameters."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from mplug.layout.inits import ZEROS, Inits
from mplug.layout.names import compiled
from mplug.layout.plan import TOKENS_AXIS, Parameter, Plan
from mplug.layout.widths import Widths
from mplug.layout.work import Work
from mplug.model.plans.work import work_of
from mplug_adapting.added import describe_added


def with_attached(plan: Plan, model: nn.Module, modules: Mapping[str, nn.Module]) -> Plan:
    """Add modules to a model's module, by their names in it; the plan that has them too. See `Model.attach`."""
    for name, module in modules.items():
        parent_name, _, attribute = name.rpartition(".")
        parent = model.get_submodule(parent_name)
        if getattr(parent, attribute, None) is not None:
            raise ValueError(f"'{parent_name}' has the attribute '{attribute}' already; attach the module elsewhere")
        if not getattr(parent, "adaptable", True):
            raise ValueError(f"'{parent_name}' cannot have an adapter: its block states so (adaptable=False)")
        setattr(parent, attribute, module)
    parameters, buffers = describe_added(modules, Inits(ZEROS, ZEROS))
    if any(one.widths for one in plan.parameters.values()):  # a narrower base model has none of them either
        parameters = {name: replace(one, widths=one.widths or Widths()) for name, one in parameters.items()}
    work = tuple(_added_work(plan, modules))
    of_tokens = {unit.name for unit in plan.units if unit.sequence == TOKENS_AXIS}
    per_token = sum(one.flops.per_token for one in work if one.unit in of_tokens)
    return replace(
        plan,
        parameters={**plan.parameters, **parameters},
        buffers={**plan.buffers, **buffers},
        flops=replace(plan.flops, per_token=plan.flops.per_token + per_token),
        external=_without(plan.external, [*parameters, *_states(buffers)]),
        work=None if plan.work is None else (*plan.work, *work),
    )


def _added_work(plan: Plan, modules: Mapping[str, nn.Module]) -> Iterator[Work]:
    """The work of added modules, for a plan that states its own; the input of each may depend on the whole unit."""
    for name, module in modules.items():
        unit = next(unit.name for unit in plan.units if name.startswith(f"{unit.name}."))
        yield from (replace(work, unit=unit, after=(unit,)) for work in work_of(module, name))


def _states(buffers: Mapping[str, Any]) -> list[str]:
    return [pattern for pattern, buffer in buffers.items() if not buffer.is_statistic]


def _without(external: Any, patterns: Iterable[str]) -> Any:
    """External names of a model whose published form does not have the parameters that `patterns` match."""
    if external is None:
        return None
    return replace(external, tensors={**external.tensors, **dict.fromkeys(patterns)})


def with_frozen(plan: Plan, names: Iterable[str], known: list[str]) -> Plan:
    """The plan that does not train these of the `known` parameters; see `Model.freeze`."""
    frozen = set(names)
    if unknown := frozen - set(known):
        raise ValueError(f"the model has no parameter '{min(unknown)}'")
    return replace(plan, parameters=_frozen(plan, frozen, known))


def _frozen(plan: Plan, frozen: set[str], known: list[str]) -> dict[str, Parameter]:
    found: dict[str, Parameter] = {}
    for pattern, entry in plan.parameters.items():
        regex = compiled(pattern)
        hits = [name for name in known if regex.fullmatch(name)]
        if frozen.isdisjoint(hits):
            found[pattern] = entry
        elif frozen.issuperset(hits):
            found[pattern] = replace(entry, trainable=False)
        else:
            found |= {name: replace(entry, trainable=entry.trainable and name not in frozen) for name in hits}
    return found
