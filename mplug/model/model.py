"""A model as the host handles it: a module, its plan, the placements of its parameters, its slots."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from mplug_nn.description import weights_per_token
from torch import Tensor, nn

from mplug.errors import UsageError
from mplug.gradients.owned_memory import Shards
from mplug.gradients.sinks import Sinks
from mplug.layout.gradient_flow import carrying
from mplug.layout.names import modules_around
from mplug.layout.ownership import Engine, Sharding
from mplug.layout.placement import Placement
from mplug.layout.plan import Flops, Init, Parameter, Plan, Stages, Unit
from mplug.model.draws import Draws
from mplug.model.offers import Filled
from mplug.model.units import run_units
from mplug.ops.exchanges import Item, in_order
from mplug.precisions.precision import Recipe

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from mplug.contracts import Piece, Pipeline, WeightExchange
    from mplug.layout.mesh import Mesh
    from mplug.model.adapters import Adapters, Merge
    from mplug.model.mixing_statement import Statement
    from mplug.model.passes import Passes
    from mplug.model.slot_states import HeldBuffers
    from mplug.run.run import Run


@dataclass
class Model:
    """A module on the meta device, and its plan. `build_model` returns both; the host fills in the other fields.

    `frozen` are this rank's untrained parameters, as stored at rest. A plugin that moves the memory of one, or replaces
    it in the module, must keep its `data` pointing to the values. `sharding` maps each part of a sharded optimizer
    state to the rank that owns it; `shards` is its memory on this rank. A plugin that exchanges updated weights between
    ranks appends a `WeightExchange` to `exchanges`. `pipeline` says how ranks run the `stages`, if a strategy has made
    some. `passes` describes the passes that a step of the whole model computes. `slot_buffers` are the buffers that
    suppliers of this rank's slots keep. `recipe` is that of the run's precision; products of the modules that
    `base_modules` match ignore it. `master_dtype` is the dtype of the masters; it is set when memory is allocated.
    `attached` are the modules that plugins have added, `merges` says how an export multiplies them into the model's
    parameters, and `adapters` is their published form. `weights_version` grows whenever pieces have new weights.
    """

    module: nn.Module
    plan: Plan
    placements: dict[str, Placement] = field(default_factory=dict)
    buffer_placements: dict[str, Placement] = field(default_factory=dict)
    slots: list[Filled] = field(default_factory=list)
    unit_wraps: list[Filled] = field(default_factory=list)
    slot_buffers: "list[HeldBuffers]" = field(default_factory=list)
    stages: Stages = field(default=Stages("", ()))
    own_units: tuple[Unit, ...] = ()
    own_chunks: tuple[int, ...] = (0,)
    sharding: Sharding | None = None
    shards: Shards | None = None
    pipeline: "Pipeline | None" = None
    exchanges: "list[WeightExchange]" = field(default_factory=list)
    frozen: dict[str, nn.Parameter] = field(default_factory=dict)
    passes: "Passes | None" = None
    mixing: "tuple[Statement, ...]" = ()
    draws: Draws | None = None
    recipe: Recipe | None = None
    base_modules: tuple[str, ...] = ()
    master_dtype: torch.dtype = torch.float32
    attached: dict[str, nn.Module] = field(default_factory=dict)
    merges: "dict[str, Merge]" = field(default_factory=dict)
    adapters: "Adapters | None" = None
    weights_version: int = 0
    _sinks: Sinks | None = None
    _supplied: "tuple[Piece, ...] | None" = None

    @property
    def sinks(self) -> Sinks:
        """The gradient sinks of this rank's parameters; they exist after `listen`."""
        assert self._sinks is not None, "the model has no memory yet"
        return self._sinks

    @property
    def flops(self) -> Flops:
        """The FLOPs of a step's passes: the plan's, minus those that frozen parameters make unnecessary."""
        return self.plan.flops if self.passes is None else self.passes.flops

    def attach(self, modules: Mapping[str, nn.Module]) -> None:
        """Add modules to the model, by their names in it ('blocks.0.attn.qkv.adapter'), and to the plan.

        Call it in `adapt_model`. Each module describes its parameters by a method `plan_entries(inits)`, as the blocks
        of `mplug_nn` do. The attribute must be absent or None: `Linear.adapter`, `Experts.up_adapter`. Published
        checkpoints of the model do not have the parameters. ValueError for an attribute that is taken, and for a linear
        that is not `adaptable`.
        """
        from mplug.model.attaching import with_attached

        self.plan = with_attached(self.plan, self.module, modules)
        self.attached |= modules

    def freeze(self, names: Iterable[str]) -> None:
        """State in the plan that parameters are not trained, by their names. Call it in `adapt_model`."""
        from mplug.model.attaching import with_frozen

        self.plan = with_frozen(self.plan, names, list(self.parameters()))

    def listen(self, dtype: torch.dtype = torch.float32) -> None:
        """Give every parameter of this rank a gradient sink with a buffer of `dtype`.

        If an engine keeps the gradients, there is no sink, and a parameter has the gradient that autograd accumulates
        (`.grad`).
        """
        if self.engine is not None:
            self._sinks = Sinks({})
            return
        families = {name: placement.data_axes for name, placement in self.placements.items()}
        self._sinks = Sinks(self.parameters(), families, dtype, self.shards.listen(dtype) if self.shards else None)
        self._sinks.chunks = len(self.own_chunks)

    @property
    def engine(self) -> "Engine | None":
        """The engine that keeps masters, states and gradients, if a strategy has one (`Sharding.engine`)."""
        return None if self.sharding is None else self.sharding.engine

    def supply(self, pieces: "Iterable[Piece]") -> None:
        """Hand over this rank's pieces, whose memory an engine keeps; the strategy with the engine calls it once."""
        self._supplied = tuple(pieces)

    @property
    def supplied(self) -> "tuple[Piece, ...]":
        """The pieces that the strategy with the engine has supplied; RuntimeError if it has not."""
        if self._supplied is None:
            raise RuntimeError("the strategy whose sharding has an engine has not called model.supply in wrap_model")
        return self._supplied

    def weights_written(self) -> None:
        """Begin all `exchanges`: this rank's pieces have new weights, and other ranks lack them."""
        self.weights_version += 1
        for exchange in self.exchanges:
            exchange.begin()

    def weights_settled(self) -> None:
        """Wait for the exchanges that `weights_written` has begun."""
        for exchange in self.exchanges:
            if exchange.wait is not None:
                exchange.wait()

    def data_groups(self, run: "Run") -> dict[str, "ProcessGroup | None"]:
        """The process group of each parameter of the whole model over which its gradient is data-parallel.

        It consists of the ranks along the placement's `data_axes`; it is None if that is this rank alone. Collective:
        all ranks must call it in the same order.
        """
        groups = {axes: run.group(*axes) for axes in dict.fromkeys(one.data_axes for one in self.placements.values())}
        return {name: groups[placement.data_axes] for name, placement in self.placements.items()}

    def parameters(self) -> dict[str, nn.Parameter]:
        """Every parameter of this rank once; a tied one has the first of its names in the whole model.

        They have the order of the placements, which is that of the whole model's modules, on every rank.
        """
        first = {name: names[0] for names in self.plan.tied for name in names}
        found = {first.get(name, name): parameter for name, parameter in self.module.named_parameters()}
        if not self.placements:
            return found
        return {item.name: found[item.name] for item in in_order((Item(name, ()) for name in found), self.placements)}

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
            self.placements[name] = self.placed(name, described, tuple(parameters[name].shape), mesh)
        buffers = dict(self.module.named_buffers())
        for name, buffer in self.plan.match_buffers(buffers).items():
            described = Parameter(buffer.dims, Init("constant", value=buffer.value), buffer.over)
            self.buffer_placements[name] = self.placed(name, described, tuple(buffers[name].shape), mesh)

    def placed(self, name: str, described: Parameter, shape: tuple[int, ...], mesh: "Mesh") -> Placement:
        """The placement of a parameter or buffer that the plan describes, from the stages and the mesh alone."""
        _refuse_other_shape(name, described, shape)
        stages = tuple(sorted({self.stages.rank_of(chunk) for chunk in self._chunks_of(name)}))
        if not stages:
            raise ValueError(f"parameter '{name}' is in no unit of the plan")
        over = (*described.over, "units") if len(stages) > 1 else described.over
        described = replace(described, over=over)
        placement = Placement(name, described, shape, mesh, stage_axis=self.stages.axis, stages=stages)
        placement.local_shape(0)  # raises UsageError if the ranks do not divide a dimension
        return placement

    def _chunks_of(self, name: str) -> set[int]:
        around = (module for alias in self.plan.names_of(name) for module in modules_around(alias))
        return {self.stages.of[module] for module in around if module in self.stages.of}

    def trained_units(self) -> set[str]:
        """The names of the units, of all stages, that have a trained parameter."""
        trained = [name for name, placement in self.placements.items() if placement.parameter.trainable]
        around = {one for name in trained for alias in self.plan.names_of(name) for one in modules_around(alias)}
        return {unit.name for unit in self.plan.units if unit.name in around}

    def learning(self, chunk: int) -> frozenset[str]:
        """The activations before a chunk of the pipeline that carry a gradient because an earlier unit is trained.

        Backward hands the gradients of exactly these activations to the previous chunk. If `chunk` is the number of
        chunks, the answer is the activations with which backward starts.
        """
        before = sum(len(units) for units in self.stages.units[:chunk])
        return carrying(self.plan.units, self.trained_units())[before]

    @property
    def has_backward(self) -> bool:
        """Whether this rank runs backward passes: a unit in one of its chunks, or before it, is trained."""
        return any(self.learning(chunk + 1) for chunk in self.own_chunks)

    def keep_stage(self, rank: int) -> None:
        """Remove the units of other ranks' chunks; `rank` is the index along the pipeline's axis.

        It sets `own_chunks`, and `own_units` to the remaining units.
        """
        self.own_chunks = self.stages.chunks_of(rank)
        kept = {name for chunk in self.own_chunks for name in self.stages.units[chunk]}
        for unit in self.plan.units:
            if unit.name not in kept:
                parent, _, child = unit.name.rpartition(".")
                delattr(self.module.get_submodule(parent), child)
        self.own_units = tuple(unit for unit in self.plan.units if unit.name in kept)

    def units_of(self, chunk: int) -> tuple[Unit, ...]:
        """The units of a chunk of this rank."""
        return tuple(unit for unit in self.own_units if self.stages.of[unit.name] == chunk)

    def trained_in(self, chunk: int) -> tuple[str, ...]:
        """The names of the trained parameters in a chunk of this rank."""
        parts = [self.module.get_submodule(unit.name) for unit in self.units_of(chunk)]
        inside = {id(parameter) for part in parts for parameter in part.parameters()}
        return tuple(name for name, one in self.parameters().items() if id(one) in inside and name in self.sinks)

    def crossing(self, chunk: int) -> tuple[str, ...]:
        """The activations that enter a chunk from the previous one: computed before it, and used in it or later."""
        before = {name for units in self.stages.units[:chunk] for name in units}
        made = [name for unit in self.plan.units if unit.name in before for name in unit.outputs]
        used = {name for unit in self.plan.units if unit.name not in before for name in unit.inputs}
        return tuple(name for name in dict.fromkeys(made) if name in used)

    def unit_weight(self, name: str) -> int:
        """Number of weight elements that a unit multiplies with a token: those of linear layers and chosen experts."""
        return weights_per_token(self.module.get_submodule(name))

    def placement_of(self, name: str) -> Placement:
        """The placement of a parameter by any of its names."""
        return self.placements[self.plan.names_of(name)[0]]

    def run(self, batch: Mapping[str, Tensor], chunk: int | None = None) -> dict[str, Tensor]:
        """Run this rank's units, or those of one chunk, on a micro batch's entries and the activations before them."""
        units = self.own_units if chunk is None else self.units_of(chunk)
        if self.draws is None or not self.module.training:
            return run_units(self.module, units, batch)
        key = self.draws.key_in(batch)
        begin = None if key is None else partial(self.draws.begin, key=key)
        return run_units(self.module, units, batch, begin)

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
            f"the model's module sets requires_grad=False on parameter '{name}', and its plan trains the parameter; "
            f"freeze it in the plan (Parameter.trainable=False, or Plan.frozen) or by model.frozen, and do not set "
            f"requires_grad"
        )
    parameter.requires_grad_(described.trainable)


def _refuse_other_shape(name: str, described: Parameter, shape: tuple[int, ...]) -> None:
    if len(described.dims) != len(shape):
        raise ValueError(f"the plan gives parameter '{name}' {len(described.dims)} dimensions; it has shape {shape}")
    for dim, length in zip(described.dims, shape, strict=True):
        if not isinstance(dim, str):
            segments = dim if isinstance(dim, tuple) else (dim,)
            if sum(segment.length for segment in segments) != length:
                raise ValueError(f"the plan's segments of parameter '{name}' do not sum to its shape {shape}")
