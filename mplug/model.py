"""A model as the host handles it: a module, its plan, the placements of its parameters, and its slots."""

import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mplug.draws import Draws
from mplug.errors import UsageError
from mplug.freezing import carrying
from mplug.gradients import Sinks
from mplug.nn import Attention, AttentionSpec, DotProductAttention, arguments
from mplug.nn.linear import Linear
from mplug.nn.moe import MixtureOfExperts
from mplug.nn.random import key_of, normal
from mplug.nn.specification import DOCUMENTS
from mplug.plan import Box, Flops, Init, Parameter, Placement, Plan, Stages, Unit
from mplug.precision import wide
from mplug.sharding import FlatBox, Sharding
from mplug.shards import Shards
from mplug.slots import UNIT, Filled, Selection, Site, select

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from mplug.mesh import Mesh
    from mplug.mixing import Statement
    from mplug.passes import Passes
    from mplug.run import Run

CHUNK = 1 << 22
"""Number of initial values that are generated at a time: it bounds the memory of fp64 temporaries."""


@dataclass
class Model:
    """A module on the meta device, and its plan. `build_model` returns both; the host fills in the other fields.

    `frozen` are this rank's untrained parameters, as stored at rest. A plugin that moves the memory of one, or replaces
    it in the module, must keep its `data` pointing to the values. `sharding` says which rank owns which part of a
    sharded optimizer state; `shards` is its memory on this rank. A plugin that exchanges updated weights between ranks
    appends to `when_written` a function that starts the exchange. `passes` says what a step of the whole model
    computes.
    """

    module: nn.Module
    plan: Plan
    placements: dict[str, Placement] = field(default_factory=dict)
    buffer_placements: dict[str, Placement] = field(default_factory=dict)
    slots: list[Filled] = field(default_factory=list)
    unit_wraps: list[Filled] = field(default_factory=list)
    stages: Stages = field(default=Stages("", ()))
    own_units: tuple[Unit, ...] = ()
    sharding: Sharding | None = None
    shards: Shards | None = None
    when_written: list[Callable[[], None]] = field(default_factory=list)
    frozen: dict[str, nn.Parameter] = field(default_factory=dict)
    passes: "Passes | None" = None
    mixing: "tuple[Statement, ...]" = ()
    draws: Draws | None = None
    _sinks: Sinks | None = None

    @property
    def sinks(self) -> Sinks:
        """The gradient sinks of this rank's parameters; they exist after `listen`."""
        assert self._sinks is not None, "the model has no memory yet"
        return self._sinks

    @property
    def flops(self) -> Flops:
        """The FLOPs of a step's passes: the plan's, minus those that frozen parameters make unnecessary."""
        return self.plan.flops if self.passes is None else self.passes.flops

    def listen(self, dtype: torch.dtype = torch.float32) -> None:
        """Give every parameter of this rank a gradient sink with a buffer of `dtype`."""
        families = {name: placement.data_axes for name, placement in self.placements.items()}
        self._sinks = Sinks(self.parameters(), families, dtype, self.shards.listen(dtype) if self.shards else None)

    def weights_written(self) -> None:
        """Call the functions in `when_written`: this rank's pieces have new weights, other ranks' copies do not."""
        for begin in self.when_written:
            begin()

    def data_groups(self, run: "Run") -> dict[str, "ProcessGroup | None"]:
        """The process group of each parameter of the whole model over which its gradient is data-parallel.

        It consists of the ranks along the placement's `data_axes`; it is None if that is this rank alone. Collective:
        all ranks must call it in the same order.
        """
        groups = {axes: run.group(*axes) for axes in dict.fromkeys(one.data_axes for one in self.placements.values())}
        return {name: groups[placement.data_axes] for name, placement in self.placements.items()}

    def parameters(self) -> dict[str, nn.Parameter]:
        """Every parameter of this rank once; a tied one has the first of its names in the whole model."""
        first = {name: names[0] for names in self.plan.tied for name in names}
        return {first.get(name, name): parameter for name, parameter in self.module.named_parameters()}

    def buffers(self) -> dict[str, Tensor]:
        """This rank's buffers that the plan describes, by name."""
        return {name: buffer for name, buffer in self.module.named_buffers() if name in self.buffer_placements}

    def states(self) -> dict[str, Tensor]:
        """The buffers among them that are states, not statistics: checkpoints save these."""
        return {n: buffer for n, buffer in self.buffers().items() if not self.buffer_placements[n].parameter.over}

    def place(self, mesh: "Mesh", stages: Stages | None) -> None:
        """Compute where each parameter and buffer lives, from the plan, the stages and the mesh alone."""
        self.stages = stages or Stages("", (tuple(unit.name for unit in self.plan.units),))
        parameters = self.parameters()
        for name, described in self.plan.match(parameters).items():
            _freeze_as_planned(name, parameters[name], described)
            self.placements[name] = self._placed(name, described, tuple(parameters[name].shape), mesh)
        buffers = dict(self.module.named_buffers())
        for name, buffer in self.plan.match_buffers(buffers).items():
            described = Parameter(buffer.dims, Init("constant", value=buffer.value), buffer.over)
            self.buffer_placements[name] = self._placed(name, described, tuple(buffers[name].shape), mesh)

    def _placed(self, name: str, described: Parameter, shape: tuple[int, ...], mesh: "Mesh") -> Placement:
        _refuse_other_shape(name, described, shape)
        used_in = self._stages_of(name)
        if not used_in:
            raise ValueError(f"parameter '{name}' lies in no unit of the plan")
        holders = tuple(r for r in range(mesh.world_size) if mesh.index(r, self.stages.axis) in used_in)
        over = (*described.over, "units") if len(used_in) > 1 else described.over
        placement = Placement(name, replace(described, over=over), shape, mesh, holders)
        placement.local_shape(0)  # raises UsageError if the ranks do not divide a dimension
        return placement

    def _stages_of(self, name: str) -> set[int]:
        names = self.plan.names_of(name)
        return {
            stage
            for stage, units in enumerate(self.stages.units)
            if any(one.startswith(f"{unit}.") for one in names for unit in units)
        }

    def trained_units(self) -> set[str]:
        """The names of the units, of all stages, that have a trained parameter."""
        trained = [name for name, placement in self.placements.items() if placement.parameter.trainable]
        names = [alias for name in trained for alias in self.plan.names_of(name)]
        return {unit.name for unit in self.plan.units if any(name.startswith(f"{unit.name}.") for name in names)}

    def learning(self, stage: int) -> frozenset[str]:
        """The activations before a stage that carry a gradient because an earlier unit is trained.

        Backward sends the gradients of exactly these activations to the previous stage. For the stage number after the
        last one, they are the activations with which backward starts.
        """
        before = sum(len(units) for units in self.stages.units[:stage])
        return carrying(self.plan.units, self.trained_units())[before]

    def keep_stage(self, stage: int) -> None:
        """Remove the units of all other stages from the module, and set `own_units` to the remaining ones."""
        kept = set(self.stages.units[stage])
        for unit in self.plan.units:
            if unit.name not in kept:
                parent, _, child = unit.name.rpartition(".")
                delattr(self.module.get_submodule(parent), child)
        self.own_units = tuple(unit for unit in self.plan.units if unit.name in kept)

    def crossing(self, stage: int) -> tuple[str, ...]:
        """The activations that enter a stage from the previous one: computed before it, and used in it or later."""
        before = {name for units in self.stages.units[:stage] for name in units}
        made = [name for unit in self.plan.units if unit.name in before for name in unit.outputs]
        used = {name for unit in self.plan.units if unit.name not in before for name in unit.inputs}
        return tuple(name for name in dict.fromkeys(made) if name in used)

    def unit_weight(self, name: str) -> int:
        """Number of weight elements that a unit multiplies with a token: those of linear layers and chosen experts."""
        unit = self.module.get_submodule(name)
        linear = sum(part.weight.numel() for part in unit.modules() if isinstance(part, Linear))
        return linear + sum(part.weights_per_token for part in unit.modules() if isinstance(part, MixtureOfExperts))

    def placement_of(self, name: str) -> Placement:
        """The placement of a parameter by any of its names."""
        return self.placements[self.plan.names_of(name)[0]]

    def run(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Run this rank's units on a micro batch's entries and the activations of earlier stages."""
        if self.draws is None or not self.module.training:
            return run_units(self.module, self.own_units, batch)
        key = self.draws.key_in(batch)
        begin = None if key is None else partial(self.draws.begin, key=key)
        return run_units(self.module, self.own_units, batch, begin)

    def loss(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Run all units on a micro batch: (sum of the losses, number of targets)."""
        values = self.run(batch)
        return values["loss"], values["num_targets"]

    def logits(self, batch: Mapping[str, Tensor]) -> Tensor:
        """The logits [B, S, V] that the plan's inference units compute."""
        return run_units(self.module, self.plan.inference, batch)["logits"]


def _freeze_as_planned(name: str, parameter: nn.Parameter, described: Parameter) -> None:
    """Set `requires_grad` as the plan says; UsageError if the module freezes a parameter that the plan trains."""
    if described.trainable and not parameter.requires_grad:
        raise UsageError(
            f"the model's module sets requires_grad of parameter '{name}' to False, and its plan says that it is "
            f"trained; freeze it in the plan (Parameter.trainable=False, or Plan.frozen) or by model.frozen, and leave "
            f"requires_grad alone"
        )
    parameter.requires_grad_(described.trainable)


def _refuse_other_shape(name: str, described: Parameter, shape: tuple[int, ...]) -> None:
    if len(described.dims) != len(shape):
        raise ValueError(f"the plan gives parameter '{name}' {len(described.dims)} dimensions; it has shape {shape}")
    for dim, length in zip(described.dims, shape, strict=True):
        if not isinstance(dim, str):
            segments = dim if isinstance(dim, tuple) else (dim,)
            if sum(segment.length for segment in segments) != length:
                raise ValueError(f"the plan's segments of parameter '{name}' do not add up to its shape {shape}")


def run_units(
    module: nn.Module,
    units: Iterable[Unit],
    batch: Mapping[str, Tensor],
    before: Callable[[Unit], None] | None = None,
) -> dict[str, Tensor]:
    """Run units in order on a micro batch's entries; returns the entries and all activations.

    `before` is called before each unit.
    """
    values = dict(batch)
    for unit in units:
        if before is not None:
            before(unit)
        part = module.get_submodule(unit.name)
        run = part if unit.method == "forward" else getattr(part, unit.method)  # calling `part` runs forward hooks
        optional = {name: values[name] for name in unit.optional if name in values}
        outputs = run(*(values[name] for name in unit.inputs), **optional)
        values |= zip(unit.outputs, outputs if isinstance(outputs, tuple) else (outputs,), strict=True)
    return values


# Slots.


def sites(module: nn.Module, entries: Container[str] = ()) -> Iterator[Site]:
    """Every slot of every module, in order. `entries` are the optional entries that micro batches have."""
    for name, part in module.named_modules():
        needs = getattr(part, "needs", _needs_nothing)
        for slot in getattr(type(part), "SLOTS", ()):
            said = _needs_of_spec(part, entries) if slot == "Attention.core" else frozenset()
            yield Site(role_of(name), slot, part, name, needs(slot, entries) | said)


def _needs_of_spec(part: nn.Module, entries: Container[str]) -> frozenset[str]:
    """The needs of a module's attention specification; they apply in addition to its method `needs`."""
    spec = getattr(part, "spec", None)
    return replace(spec, documents=DOCUMENTS in entries).needs if isinstance(spec, AttentionSpec) else frozenset()


def _needs_nothing(slot: str, entries: Container[str]) -> frozenset[str]:
    return frozenset()


def role_of(name: str) -> str:
    """A name with its indices starred: 'blocks.3.attn' -> 'blocks.*.attn'."""
    return re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", name)


def fill_slots(model: Model, run: "Run", offers: Iterable[Any]) -> Selection:
    """Select among offers, install the selected suppliers, and apply the wraps around them from inner to outer."""
    names = [unit.name for unit in model.own_units]
    units = [Site(role_of(name), UNIT, model.module.get_submodule(name), name) for name in names]
    selection = select([*sites(model.module, run.entries), *units], offers, run.config.kernels, run)
    built: dict[tuple[Any, ...], Callable[..., Any]] = {}
    for filled in selection.filled:
        attribute = filled.site.slot.rpartition(".")[2]
        default = getattr(filled.site.module, attribute)
        supplier = filled.offer.suppliers[filled.site.slot] if filled.offer else default
        key = (filled.site.role, supplier, *filled.wraps)
        if key not in built:  # one callable per role: one closure per site would recompile every block
            built[key] = _wrapped(filled, supplier)
        setattr(filled.site.module, attribute, built[key])
    model.slots, model.unit_wraps = selection.filled, selection.units
    return selection


def _wrapped(filled: Filled, supplier: Callable[..., Any]) -> Callable[..., Any]:
    """A supplier with its wraps applied; attention suppliers and wraps with the signature of 0.1 get an adapter."""
    if filled.site.slot != "Attention.core":
        for wrap in filled.wraps:
            supplier = wrap.wrap(supplier)
        return supplier
    module, needs, plugin = filled.site.module, filled.site.needs, filled.supplier
    try:
        supplier = arguments.by_specification(supplier, needs)
        for wrap in filled.wraps:
            plugin = wrap.plugin
            supplier = arguments.wrapped(wrap.wrap, supplier, needs)
    except ValueError as error:
        raise UsageError(f"{plugin} cannot serve {filled.site.slot} of '{filled.site.role}': {error}") from None
    if not hasattr(module, "spec"):
        return arguments.by_arguments(supplier)
    return supplier if type(module) in (Attention, DotProductAttention) else arguments.by_either(supplier)


def wrap_units(model: Model) -> None:
    """Apply the selected wraps around the (possibly compiled) units of this rank, from inner to outer."""
    methods = {unit.name: unit.method for unit in model.own_units}
    for filled in model.unit_wraps:
        part, method = filled.site.module, methods[filled.site.name]
        for wrap in filled.wraps:
            setattr(part, method, wrap.wrap(getattr(part, method)))


# Values.


def allocate(model: Model, rank: int, device: torch.device, dtype: torch.dtype, seed: int) -> None:
    """Allocate this rank's parameters (zeros of `dtype`) and buffers.

    A parameter that is gathered for computation gets memory for this rank's rows only: those of the master if it is
    trained (fp32, or fp64 in a run in fp64).
    """
    replaced: dict[int, nn.Parameter] = {}
    model.shards = Shards(model.sharding, model.placements, rank, device, dtype) if model.sharding else None
    for name, old in model.parameters().items():
        placement = model.placements[name]
        trained = placement.parameter.trainable
        kept = wide(dtype) if placement.gathered_along and trained else dtype
        where = torch.device("cpu") if placement.offloaded else device
        local = model.shards.weight(name) if model.shards else None
        if local is None:
            local = torch.zeros(placement.local_shape(rank), device=where, dtype=kept)
        replaced[id(old)] = nn.Parameter(local, requires_grad=trained)
        if not trained:
            model.frozen[name] = replaced[id(old)]
    for name, module in model.module.named_modules():
        for attribute, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[attribute] = replaced[id(parameter)]
        for attribute, buffer in module._buffers.items():
            if buffer is not None:
                full_name = f"{name}.{attribute}" if name else attribute
                module._buffers[attribute] = _first_value(model, full_name, buffer, rank, device, seed)


def _first_value(model: Model, name: str, buffer: Tensor, rank: int, device: torch.device, seed: int) -> Tensor:
    """A buffer with its initial value: `site` and `loss_scale` are the host's; the plan describes all others."""
    module, _, attribute = name.rpartition(".")
    if attribute == "site":
        return torch.tensor(key_of(seed, "site", module), device=device)
    if attribute == "loss_scale":
        return torch.ones((), device=device)
    if name not in model.buffer_placements:
        raise ValueError(f"buffer '{name}' has no initial value; describe it in the plan's buffers")
    placement = model.buffer_placements[name]
    return torch.full(placement.local_shape(rank), placement.parameter.init.value, dtype=buffer.dtype, device=device)


@torch.no_grad()
def initialize(tensors: Mapping[str, Tensor], placements: Mapping[str, Placement], rank: int, seed: int) -> None:
    """Fill this rank's tensors with initial values, which do not depend on the layout; padding stays zero."""
    for name, parameter in tensors.items():
        placement = placements[name]
        for box in placement.boxes(rank):
            region(parameter, box).copy_(_initial(name, placement, box, parameter.device, seed))


def region(local: Tensor, box: Box) -> Tensor:
    """The view of a rank's local tensor that holds a box."""
    if isinstance(box, FlatBox):
        return local.as_strided(box.shape, box.strides, local.storage_offset() + box.offset[0])
    return local[tuple(slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))]


def _initial(name: str, placement: Placement, box: Box, device: torch.device, seed: int) -> Tensor:
    init = placement.parameter.init
    if init.kind == "constant":
        return torch.full(box.shape, init.value, device=device)
    key, strides = key_of(seed, "parameter", name), torch.empty(placement.shape, device="meta").stride()
    counter = torch.zeros((), dtype=torch.int64, device=device)
    for dim, (start, length) in enumerate(zip(box.start, box.shape, strict=True)):
        counter = counter[..., None] + torch.arange(start, start + length, device=device) * strides[dim]
    flat = counter.flatten()
    values = [normal(key, part).float() * init.std for part in flat.split(CHUNK)]
    return torch.cat(values).view(box.shape)
