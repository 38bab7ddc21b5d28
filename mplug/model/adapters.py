"""Adapters of a model: modules that a plugin attaches, their published form, and how they are merged into weights."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mplug.layout.external import ExternalNames
from mplug.layout.names import compiled
from mplug.nn.description import describe_added
from mplug.nn.inits import ZEROS, Inits
from mplug.nn.linear import Linear

if TYPE_CHECKING:
    from mplug.layout.plan import Parameter, Plan
    from mplug.model.model import Model


@dataclass(frozen=True)
class Merge:
    """How an export computes a tensor from parameters of a checkpoint: compute(*inputs) in fp32 or fp64.

    `inputs` are names of parameters. `compute` receives the whole tensors and returns a tensor of the shape of the
    parameter whose values it replaces.
    """

    inputs: tuple[str, ...]
    compute: Callable[..., Tensor]


@dataclass(frozen=True)
class RowNorms:
    """The Euclidean norms of `length` rows of a weight from row `start` on."""

    weight: str
    start: int
    length: int


def row_norms(weight: Tensor) -> Tensor:
    """The norms of the rows of a weight [O, I] -> [O], in at least fp32; the sums are in fp64.

    So a norm has the same bits under every layout, apart from ties of the last rounding.
    """
    return squares_of_rows(weight).sqrt().to(torch.promote_types(weight.dtype, torch.float32))


def squares_of_rows(weight: Tensor) -> Tensor:
    """The squared norms of the rows of a weight [O, I] -> [O], in fp64."""
    wide = weight.to(torch.float64)
    return (wide * wide).sum(dim=1)


@dataclass(frozen=True)
class Adapters:
    """The published form of the adapters alone: the folder that the library PEFT reads and writes.

    `names` maps the adapters' parameters to the tensors of adapter_model.safetensors; None, with a `reason`, if there
    is no such form. `config` is adapter_config.json. A parameter in `offsets` is published as its sum with these norms
    (the magnitudes of DoRA). A new run begins with the adapters of the folder `path`.
    """

    names: ExternalNames | None
    config: Mapping[str, Any]
    offsets: Mapping[str, RowNorms] = field(default_factory=dict)
    path: Path | None = None
    reason: str = ""


def attach(model: "Model", modules: Mapping[str, nn.Module]) -> None:
    """Add modules to a model by their names in it; see `Model.attach`."""
    for name, module in modules.items():
        parent_name, _, attribute = name.rpartition(".")
        parent = model.module.get_submodule(parent_name)
        if getattr(parent, attribute, None) is not None:
            raise ValueError(f"'{parent_name}' has the attribute '{attribute}' already; attach the module elsewhere")
        if isinstance(parent, Linear) and attribute == "adapter" and not parent.adaptable:
            raise ValueError(f"'{parent_name}' cannot have an adapter: its block multiplies by the weight itself")
        setattr(parent, attribute, module)
    added = describe_added(modules, Inits(ZEROS, ZEROS))
    plan = model.plan
    per_token = plan.flops.per_token + added.flops.per_token
    model.plan = replace(
        plan,
        parameters={**plan.parameters, **added.parameters},
        buffers={**plan.buffers, **added.buffers},
        flops=replace(plan.flops, per_token=per_token),
        external=_without(plan.external, [*added.parameters, *_states(added.buffers)]),
    )
    model.attached |= modules


def _states(buffers: Mapping[str, Any]) -> list[str]:
    return [pattern for pattern, buffer in buffers.items() if not buffer.is_statistic]


def _without(external: ExternalNames | None, patterns: Iterable[str]) -> ExternalNames | None:
    """External names of a model whose published form does not have the parameters that `patterns` match."""
    if external is None:
        return None
    return replace(external, tensors={**external.tensors, **dict.fromkeys(patterns)})


def freeze_parameters(model: "Model", names: Iterable[str]) -> None:
    """Change the plan so that it does not train the named parameters; see `Model.freeze`."""
    frozen = set(names)
    known = list(model.parameters())
    if unknown := frozen - set(known):
        raise ValueError(f"the model has no parameter '{min(unknown)}'")
    model.plan = replace(model.plan, parameters=_frozen(model.plan, frozen, known))


def _frozen(plan: "Plan", frozen: set[str], known: list[str]) -> "dict[str, Parameter]":
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


def attached_parameters(model: "Model") -> list[str]:
    """The names of the parameters of all attached modules of this rank."""
    prefixes = tuple(f"{name}." for name in model.attached)
    return [name for name in model.parameters() if name.startswith(prefixes)] if prefixes else []
