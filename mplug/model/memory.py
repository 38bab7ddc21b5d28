"""Allocates the parameters and buffers of a rank, and gives them initial values."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from mplug.gradients.region import region
from mplug.gradients.wide import wide
from mplug.layout.placement import Box, Placement
from mplug.layout.plan import Init
from mplug.model.model import Model
from mplug.model.sharding import shardings
from mplug.tensors.host_buffers import purpose_of
from mplug.tensors.random import key_of, normal, uniform

CHUNK = 1 << 22
"""Number of initial values that are generated at a time: it bounds the memory of fp64 temporaries."""


def allocate(
    model: Model,
    rank: int,
    device: torch.device,
    dtype: torch.dtype,
    seed: int,
    masters: torch.dtype | None = None,
) -> None:
    """Allocate this rank's parameters (zeros of `dtype`) and buffers.

    `masters` is the dtype of master weights; None: fp32, or fp64 if `dtype` is fp64.

    A parameter that is gathered for computation gets memory for this rank's rows only: those of the master if it is
    trained.
    """
    replaced: dict[int, nn.Parameter] = {}
    model.master_dtype = masters or wide(dtype)
    is_sharded = model.sharding is not None and model.engine is None
    model.shards = shardings().memory(model, rank, device, dtype) if is_sharded else None
    for name, old in model.parameters().items():
        placement = model.placements[name]
        trained = placement.parameter.trainable
        kept = model.master_dtype if placement.gathered_along and trained else dtype
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
    """A buffer with its initial value: the plan describes all that the host does not fill."""
    module, _, attribute = name.rpartition(".")
    purpose = purpose_of(model.module.get_submodule(module), attribute)
    if purpose == "site key":
        return torch.tensor(key_of(seed, "site", module), device=device)
    if purpose is not None:
        return torch.ones((), device=device)
    if name not in model.buffer_placements:
        raise ValueError(
            f"buffer '{name}' has no initial value; describe it in the plan's buffers, or register it by "
            f"mplug.tensors.host_buffers.register_host_buffer if the host fills it"
        )
    placement = model.buffer_placements[name]
    return torch.full(placement.local_shape(rank), placement.parameter.init.value, dtype=buffer.dtype, device=device)


@torch.no_grad()
def initialize(tensors: Mapping[str, Tensor], placements: Mapping[str, Placement], rank: int, seed: int) -> None:
    """Fill this rank's tensors with initial values, which do not depend on the layout; padding stays zero."""
    for name, parameter in tensors.items():
        placement = placements[name]
        for box in placement.boxes(rank):
            region(parameter, box).copy_(_initial(name, placement, box, parameter.device, seed))


def _initial(name: str, placement: Placement, box: Box, device: torch.device, seed: int) -> Tensor:
    init = placement.parameter.init
    if init.kind == "constant":
        return torch.full(box.shape, init.value, device=device)
    key, strides = key_of(seed, "parameter", name), torch.empty(placement.shape, device="meta").stride()
    counter = torch.zeros((), dtype=torch.int64, device=device)
    for dim, (start, length) in enumerate(zip(box.start, box.shape, strict=True)):
        counter = counter[..., None] + torch.arange(start, start + length, device=device) * strides[dim]
    flat = counter.flatten()
    values = [_drawn(init, key, part) for part in flat.split(CHUNK)]
    drawn = torch.cat(values).view(box.shape)
    return drawn * _stds(placement, box).to(device) if init.segment_stds else drawn


def _stds(placement: Placement, box: Box) -> Tensor:
    """The standard deviation of each element along the fused dimension of a box, to multiply the box by."""
    stds = placement.parameter.init.segment_stds
    dim = next(dim for dim, segments in enumerate(placement.dims) if len(segments) > 1)
    lengths = torch.tensor([segment.length for segment in placement.dims[dim]])
    whole = torch.tensor(stds).repeat_interleave(lengths)
    own = whole[box.start[dim] : box.start[dim] + box.shape[dim]]
    return own.view(-1, *(1 for _ in box.shape[dim + 1 :]))


def _drawn(init: Init, key: int, counter: Tensor) -> Tensor:
    """Initial values that are drawn, in fp32, for int64 counters."""
    if init.kind == "normal":
        drawn = normal(key, counter).float()
        return drawn if init.segment_stds else drawn * init.std
    numbers = uniform(key, counter).double()
    if init.kind != "time step":
        between = init.low + (init.high - init.low) * numbers
        return (between.log() if init.kind == "log of uniform" else between).float()
    low, high = math.log(init.low), math.log(init.high)
    steps = (low + (high - low) * numbers).exp()
    return (steps + (-(-steps).expm1()).log()).float()  # the inverse of softplus
