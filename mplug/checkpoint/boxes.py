"""Tensors by boxes, as torch.distributed.checkpoint's planners see them.

A `Boxed` is one logical tensor: its shape, and the parts of it that a rank writes or reads. torch's planners know whole
tensors, DTensors and ShardedTensors; these know parts at any place, several a rank (a fused QKV is three).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from mplug.gradients.region import region
from mplug.layout.placement import Placement
from mplug.model.model import Model

Start = tuple[int, ...]


@dataclass(frozen=True)
class Boxed:
    """A logical tensor of `shape`: where each part that this rank has begins, and the part, a view or a copy."""

    shape: tuple[int, ...]
    parts: dict[Start, Tensor]


State = dict[str, Boxed]
"""The tensors of a checkpoint by name; what a rank has no part of, it may leave out."""


def held_boxes(placement: Placement, tensor: Tensor, rank: int) -> Boxed:
    """What a rank holds of one of a parameter's tensors (its weight, the optimizer's): what it reads.

    A scalar belongs to the whole parameter, and every holder has it.
    """
    if tensor.dim() == 0:
        return Boxed((), {(): tensor} if placement.holds(rank) else {})
    return Boxed(placement.shape, {box.start: region(tensor, box) for box in placement.boxes(rank)})


def owned_boxes(placement: Placement, tensor: Tensor, rank: int) -> Boxed:
    """The boxes of one of a parameter's tensors that a rank writes: it is their first holder.

    The first holder of the parameter's first element writes a scalar.
    """
    boxes = [box for box in placement.boxes(rank) if box.copies.first == rank]
    if tensor.dim() == 0:
        return Boxed((), {(): tensor} if any(not any(box.start) for box in boxes) else {})
    return Boxed(placement.shape, {box.start: region(tensor, box) for box in boxes})


def buffer_boxes(model: Model, rank: int, boxes_of: Callable[[Placement, Tensor, int], Boxed]) -> State:
    """The states of the model's modules, as a rank reads (`held_boxes`) or writes (`owned_boxes`) them."""
    states = model.states().items()
    return {f"{name}/buffer": boxes_of(model.buffer_placements[name], state, rank) for name, state in states}


class BoxSavePlanner(DefaultSavePlanner):
    """Plans to write every part that a rank has. The global plan checks that parts neither overlap nor leave gaps."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def create_local_plan(self) -> SavePlan:
        """One item a part."""
        self.plan = SavePlan(
            [_item(name, boxed, start) for name, boxed in self.state_dict.items() for start in boxed.parts]
        )
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        """The part of an item."""
        return _part(self.state_dict, index)


def _item(name: str, boxed: Boxed, start: Start) -> WriteItem:
    part = boxed.parts[start]
    described = TensorWriteData(
        ChunkStorageMetadata(torch.Size(start), part.shape), TensorProperties(part.dtype), torch.Size(boxed.shape)
    )
    return WriteItem(MetadataIndex(name, start), WriteItemType.SHARD, tensor_data=described)


class BoxLoadPlanner(DefaultLoadPlanner):
    """Plans to read, of every saved box, what lies in a part that this rank has."""

    state_dict: State

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        """Remember what to fill and what there is."""
        self.state_dict, self.metadata, self.is_coordinator = state_dict, metadata, is_coordinator

    def create_local_plan(self) -> LoadPlan:
        """The overlaps of saved and wanted parts."""
        assert self.metadata is not None
        items: list[ReadItem] = []
        for name, boxed in self.state_dict.items():
            wanted = [ChunkStorageMetadata(torch.Size(start), part.shape) for start, part in boxed.parts.items()]
            saved = self.metadata.state_dict_metadata[name]
            assert isinstance(saved, TensorStorageMetadata)
            items += create_read_items_for_chunk_list(name, saved, wanted)
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """The part that an item fills."""
        return _part(self.state_dict, index)


def _part(state: State, index: MetadataIndex) -> Tensor:
    return state[index.fqn].parts[tuple(index.offset or ())]
