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
    """A logical tensor of `shape`, with the parts of this rank by their start positions. A part is a view or a copy."""

    shape: tuple[int, ...]
    parts: dict[Start, Tensor]


State = dict[str, Boxed]
"""The tensors of a checkpoint by name. A rank may leave out a tensor of which it has no part."""


def held_boxes(placement: Placement, tensor: Tensor, rank: int) -> Boxed:
    """The parts that a rank reads of a parameter's weight or of one of its optimizer states: all that the rank holds.

    A scalar state belongs to the whole parameter, so every holder reads it.
    """
    if tensor.dim() == 0:
        return Boxed((), {(): tensor} if placement.holds(rank) else {})
    return Boxed(placement.shape, {box.start: region(tensor, box) for box in placement.boxes(rank)})


def owned_boxes(placement: Placement, tensor: Tensor, rank: int) -> Boxed:
    """The boxes of one of a parameter's tensors that a rank writes: those of which it is the first holder.

    The first holder of the parameter's first element writes a scalar.
    """
    boxes = [box for box in placement.boxes(rank) if box.copies.first == rank]
    if tensor.dim() == 0:
        return Boxed((), {(): tensor} if any(not any(box.start) for box in boxes) else {})
    return Boxed(placement.shape, {box.start: region(tensor, box) for box in boxes})


def buffer_boxes(model: Model, rank: int, boxes_of: Callable[[Placement, Tensor, int], Boxed]) -> State:
    """The states of the model's modules; `boxes_of` is `held_boxes` to read them, or `owned_boxes` to write them."""
    states = model.states().items()
    return {f"{name}/buffer": boxes_of(model.buffer_placements[name], state, rank) for name, state in states}


class BoxSavePlanner(DefaultSavePlanner):
    """Plans to write every part of a rank. torch's global plan checks that the parts neither overlap nor leave gaps."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def create_local_plan(self) -> SavePlan:
        """One item per part."""
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
    """Plans to read the overlaps of saved boxes with the parts of this rank."""

    state_dict: State

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        """Store the tensors to fill and the metadata of the saved tensors."""
        self.state_dict, self.metadata, self.is_coordinator = state_dict, metadata, is_coordinator

    def create_local_plan(self) -> LoadPlan:
        """One item per overlap of a saved box and a part of this rank."""
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
