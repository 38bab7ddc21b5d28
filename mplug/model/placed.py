"""The second stage of a model: where everything lives. It depends on the plan, the stages and the mesh alone."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from mplug.distributed.exchanges import Item, in_order
from mplug.errors import UsageError
from mplug.layout.gradient_flow import carrying
from mplug.layout.names import modules_around
from mplug.layout.ownership import Engine, Sharding
from mplug.layout.placement import Placement
from mplug.layout.plan import Init, Parameter
from mplug.layout.stages import Stages
from mplug.layout.work import Flops
from mplug.model.built import Built

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from mplug.contracts.stepper import Pipeline
    from mplug.layout.mesh import Mesh
    from mplug.run.run import Run


@dataclass
class Placed(Built):
    """A model whose parameters, buffers and units have their places on all ranks; these are equal on every rank.

    `pipeline` says how ranks run the `stages`, if a strategy has made some. `passes` describes the passes over tokens
    that a step of the whole model computes, `stream_passes` those over rows of streams, by the entry with the lengths
    of their segments. `mixing` is what the modules mix (`mplug_invariance.Statement`). `sharding` maps each part of a
    sharded optimizer state to the rank that owns it.
    """

    placements: dict[str, Placement] = field(default_factory=dict)
    buffer_placements: dict[str, Placement] = field(default_factory=dict)
    stages: Stages = field(default=Stages("", ()))
    pipeline: "Pipeline | None" = None
    sharding: Sharding | None = None
    passes: Any = None
    stream_passes: Mapping[str, Any] = field(default_factory=dict)
    mixing: tuple[Any, ...] = ()

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

    def placement_of(self, name: str) -> Placement:
        """The placement of a parameter by any of its names."""
        return self.placements[self.plan.names_of(name)[0]]

    def parameters(self) -> dict[str, nn.Parameter]:
        """Every parameter of this rank once; a tied one has the first of its names in the whole model.

        They have the order of the placements, which is that of the whole model's modules, on every rank.
        """
        found = super().parameters()
        if not self.placements:
            return found
        return {item.name: found[item.name] for item in in_order((Item(name, ()) for name in found), self.placements)}

    def buffers(self) -> dict[str, Tensor]:
        """This rank's buffers that the plan describes, by name."""
        return {name: buffer for name, buffer in self.module.named_buffers() if name in self.buffer_placements}

    def states(self) -> dict[str, Tensor]:
        """The buffers among them that are states, not statistics: checkpoints save these."""
        return {n: buffer for n, buffer in self.buffers().items() if not self.buffer_placements[n].parameter.over}

    def set_passes(self, passes: Mapping[str, Any]) -> None:
        """Keep the passes by the entry with the lengths of segments; that of tokens is ''."""
        self.passes = passes.get("")
        self.stream_passes = {lengths: one for lengths, one in passes.items() if lengths}

    @property
    def flops(self) -> Flops:
        """The FLOPs of a step's passes over tokens: the plan's, minus those that frozen parameters make unnecessary."""
        flops: Flops = self.plan.flops if self.passes is None else self.passes.flops
        return flops

    @property
    def engine(self) -> "Engine | None":
        """The engine that keeps masters, states and gradients, if a strategy has one (`Sharding.engine`)."""
        return None if self.sharding is None else self.sharding.engine

    def data_groups(self, run: "Run") -> dict[str, "ProcessGroup | None"]:
        """The process group of each parameter of the whole model over which its gradient is data-parallel.

        It consists of the ranks along the placement's `data_axes`; it is None if that is this rank alone. Collective:
        all ranks must call it in the same order.
        """
        groups = {axes: run.group(*axes) for axes in dict.fromkeys(one.data_axes for one in self.placements.values())}
        return {name: groups[placement.data_axes] for name, placement in self.placements.items()}

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

    def crossing(self, chunk: int) -> tuple[str, ...]:
        """The activations that enter a chunk from the previous one: computed before it, and used in it or later."""
        before = {name for units in self.stages.units[:chunk] for name in units}
        made = [name for unit in self.plan.units if unit.name in before for name in unit.outputs]
        used = {name for unit in self.plan.units if unit.name not in before for name in unit.inputs}
        return tuple(name for name in dict.fromkeys(made) if name in used)


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
