"""Planners for torch.distributed.checkpoint that save and load tensors as boxes.

A `Boxed` is one logical tensor: its shape, and the parts of it that this rank writes or reads. torch's own planners
support whole tensors, DTensors and ShardedTensors. The planners of this module support parts at any position, and
several parts per rank (a fused QKV has three).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem, SavePlan, SavePlanner, WriteItem

from mplug.contracts.optimizer import LOCAL, Optimizer, Piece, ShapedState
from mplug.gradients.region import region
from mplug.layout.mesh import Mesh
from mplug.layout.placement import Placement
from mplug.model.model import Model
from mplug_saving.index import Index, Overlap
from mplug_saving.plans import KeptPlans, described

Start = tuple[int, ...]


@dataclass(frozen=True)
class Boxed:
    """A logical tensor of `shape`, with the parts of this rank by their start positions. A part is a view or a copy."""

    shape: tuple[int, ...]
    parts: dict[Start, Tensor]


State = dict[str, Boxed]
"""The tensors of a checkpoint by name. A rank may leave out a tensor if it has no part of it."""


def held_boxes(placement: Placement, tensor: Tensor, rank: int) -> Boxed:
    """The parts that a rank reads of a parameter's weight or of one of its optimizer states: all that the rank holds.

    A scalar state belongs to the whole parameter, so every holder reads it.
    """
    if tensor.dim() == 0:
        return Boxed((), {(): tensor} if placement.holds(rank) else {})
    return Boxed(placement.shape, {box.start: region(tensor, box) for box in placement.boxes(rank)})


def owned_boxes(placement: Placement, tensor: Tensor, rank: int) -> Boxed:
    """The boxes that a rank writes of a parameter's tensor: the first rank that holds a box writes it.

    The first holder of the parameter's first element writes a scalar. Each independent worker has a first rank.
    """
    boxes = [box for box in placement.boxes(rank) if box.copies.first == rank]
    if tensor.dim() == 0:
        return Boxed((), {(): tensor} if any(not any(box.start) for box in boxes) else {})
    return Boxed(placement.shape, {box.start: region(tensor, box) for box in boxes})


def state_boxes(
    piece: Piece, state: Tensor | ShapedState, rank: int, boxes_of: Callable[[Placement, Tensor, int], Boxed]
) -> Boxed:
    """The parts of an optimizer's state of a piece; `boxes_of` is `held_boxes` to read them, `owned_boxes` to write."""
    if not isinstance(state, ShapedState):
        return boxes_of(piece.placement, state, rank)
    return Boxed(state.shape, dict(state.parts) if boxes_of is held_boxes or state.writes else {})


def tensors_of_piece(
    piece: Piece, optimizer: Optimizer, rank: int, boxes_of: Callable[[Placement, Tensor, int], Boxed]
) -> State:
    """A piece's weight and states by their names in a checkpoint. Independent workers have a tensor each."""
    held: dict[str, Tensor | ShapedState] = {"weight": piece.master, **optimizer.state(piece)}
    shared = optimizer.shared
    if optimizer.weights is not None:
        held[LOCAL], held["weight"] = piece.master, held.pop(optimizer.weights)
        shared = (shared - {optimizer.weights}) | {"weight"}
    of_mesh, found = piece.placement.mesh, dict[str, Boxed]()
    for name, state in held.items():
        boxed = state_boxes(piece, state, rank, boxes_of)
        worker = of_worker if name not in shared else equal_on_workers
        found[f"{piece.name}/{name}"] = worker(boxed, of_mesh, rank, boxes_of is owned_boxes)
    return found


def of_worker(boxed: Boxed, mesh: Mesh, rank: int, writes: bool) -> Boxed:
    """A tensor of which every independent worker has its own, along a first dimension: [W, ...]."""
    index, count = mesh.worker(rank)
    if count == 1:
        return boxed
    return Boxed((count, *boxed.shape), {(index, *start): part[None] for start, part in boxed.parts.items()})


def equal_on_workers(boxed: Boxed, mesh: Mesh, rank: int, writes: bool) -> Boxed:
    """A tensor that is equal on independent workers: the first one writes it."""
    return Boxed(boxed.shape, {}) if writes and mesh.worker(rank)[0] else boxed


def buffer_boxes(model: Model, rank: int, boxes_of: Callable[[Placement, Tensor, int], Boxed]) -> State:
    """The states of the model's modules; `boxes_of` is `held_boxes` to read them, or `owned_boxes` to write them."""
    states = model.states().items()
    found = dict[str, Boxed]()
    for name, state in states:
        placement = model.buffer_placements[name]
        boxed = boxes_of(placement, state, rank)
        found[f"{name}/buffer"] = equal_on_workers(boxed, placement.mesh, rank, boxes_of is owned_boxes)
    return found


def plan_of(state: State) -> bytes:
    """The plan of a rank that writes the parts of `state`."""
    return described(
        (
            name,
            str(next(iter(boxed.parts.values())).dtype).removeprefix("torch."),
            boxed.shape,
            [(start, part.shape) for start, part in boxed.parts.items()],
        )
        for name, boxed in state.items()
        if boxed.parts
    )


class BoxSavePlanner(SavePlanner):
    """Plans to write every part of a rank.

    The ranks send compact plans, and only those that have changed since the last save (`plans`). Torch's own gathers,
    scatters and broadcasts transfer empty data. The coordinator checks that parts neither overlap nor leave gaps.
    """

    def __init__(self, plans: KeptPlans) -> None:
        self.plans = plans

    def set_up_planner(
        self, state_dict: Any, storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        """Remember what to write."""
        self.state: State = state_dict
        self.plan = plan_of(self.state)

    def create_local_plan(self) -> SavePlan:
        """The parts of this rank, if they have changed."""
        return SavePlan([], planner_data=self.plans.to_send(self.plan))

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Keep the plans of all ranks. The metadata is empty because torch would broadcast it to all ranks."""
        self.plans.receive([plan.planner_data for plan in all_plans])
        return [SavePlan([])] * len(all_plans), Metadata({})

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """The coordinator has accepted the plan."""
        self.plans.keep(self.plan)
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        """No plan has items: the writer takes all parts of `state`."""
        raise AssertionError(write_item)


class BoxLoadPlanner(DefaultLoadPlanner):
    """Plans to read the overlaps of saved boxes with the parts of this rank."""

    state_dict: State

    def __init__(self, index: Index) -> None:
        super().__init__()
        self.index = index

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        """Store the tensors to fill."""
        self.state_dict = state_dict

    def create_local_plan(self) -> LoadPlan:
        """One item per overlap of a saved box and a part of this rank. The plan's data names the files."""
        items: list[ReadItem] = []
        files: dict[MetadataIndex, str] = {}
        for name, boxed in self.state_dict.items():
            wanted = [(start, tuple(part.shape)) for start, part in boxed.parts.items()]
            for overlap in self.index.overlaps(name, wanted):
                items.append(_read_item(name, overlap))
                files[items[-1].storage_index] = overlap.file
        return LoadPlan(items, planner_data=files)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """The part that an item fills."""
        return self.state_dict[index.fqn].parts[tuple(index.offset or ())]


def _read_item(name: str, overlap: Overlap) -> ReadItem:
    return ReadItem(
        type=LoadItemType.TENSOR,
        dest_index=MetadataIndex(name, overlap.wanted),
        dest_offsets=torch.Size(overlap.placed),
        storage_index=MetadataIndex(name, overlap.chunk),
        storage_offsets=torch.Size(overlap.stored),
        lengths=torch.Size(overlap.shape),
    )
