"""Applies torch's `fully_shard` to the units of a plan, on a one-dimensional mesh over the ranks of the fsdp axis.

    a parameter at rest    a DTensor whose local tensor is this rank's rows of the fp32 master: the piece to update
    inside a unit          a plain tensor in the precision of the run, whole except for the split of tensor parallelism
    its gradient           a plain tensor, reduce-scattered as a sum; this rank's rows are added to the sink in fp32

The all-gather of weights and the reduce-scatter of gradients are each other's dual. If there are replicas besides this
axis (HSDP), another strategy sums the sinks over them; a sink holds only this rank's rows.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor

from mplug import GatheredPlacement, GradientSink
from mplug_fsdp.fit import AXIS

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from mplug import Model, Run


@dataclass(frozen=True)
class Options:
    """The strategy's config."""

    reshard_after_forward: bool
    prefetch: int
    reduce_dtype: str
    cpu_offload: bool


def shard_units(run: "Run", model: "Model", group: "ProcessGroup", options: Options) -> None:
    """Apply `fully_shard` to this rank's units; sinks and pieces keep this rank's rows."""
    mesh = DeviceMesh.from_group(group, run.device, mesh_dim_names=(AXIS,))
    rows = _take_rows(run, model)
    units = _units_by_weights(model)
    arguments: dict[str, Any] = {
        "mesh": mesh,
        "reshard_after_forward": options.reshard_after_forward,
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=run.precision.weight_dtype,
            reduce_dtype=run.precision.sum_dtype(options.reduce_dtype),
            cast_forward_inputs=False,
        ),
        "offload_policy": CPUOffloadPolicy(pin_memory=run.device == "cuda") if options.cpu_offload else OffloadPolicy(),
        "ignored_params": {one for one in model.module.parameters() if not one.is_meta},
    }
    for parts in units:
        fully_shard(parts if len(parts) > 1 else parts[0], **arguments)
    fully_shard(model.module, **arguments)  # without parameters: makes the units share streams
    for part in model.module.modules():
        if isinstance(part, FSDPModule):
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)
    for unit in model.own_units:
        if unit.method != "forward":
            register_fsdp_forward_method(model.module.get_submodule(unit.name), unit.method)
    _fill(model, rows)
    _bring_gradients(model, run.device)
    _prefetch([parts[0] for parts in units], options.prefetch)
    _run_as_root(model)
    if not model.has_backward:
        _forget_the_order_of_passes(model)


def _take_rows(run: "Run", model: "Model") -> dict[str, nn.Parameter]:
    """This rank's rows by name; in the module, meta parameters of the gathered shape replace them."""
    rows, whole = dict[str, nn.Parameter](), dict[int, nn.Parameter]()
    for name, parameter in model.parameters().items():
        placement = model.placements[name]
        if isinstance(placement, GatheredPlacement):
            rows[name] = parameter
            shape = placement.gathered_shape(run.rank)
            empty = torch.empty(shape, dtype=parameter.dtype, device="meta")
            whole[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
    for part in model.module.modules():
        for attribute, held in part._parameters.items():
            if held is not None and id(held) in whole:
                part._parameters[attribute] = whole[id(held)]
    return rows


def _units_by_weights(model: "Model") -> list[list[nn.Module]]:
    """This rank's units in order; units that share a parameter form one list, because it is gathered once for all."""
    units: list[list[nn.Module]] = []
    for unit in model.own_units:
        part = model.module.get_submodule(unit.name)
        own = set(part.parameters())
        sharing = [held for held in units if own & set(chain(*(one.parameters() for one in held)))]
        for held in sharing[1:]:
            sharing[0].extend(held)
            units.remove(held)
        if sharing:
            sharing[0].append(part)
        else:
            units.append([part])
    return units


def _fill(model: "Model", rows: Mapping[str, nn.Parameter]) -> None:
    """Allocate the sharded parameters on the device of the rows, and make the rows views of that memory.

    Loading moves the memory: torch pads a rank's rows if they are fewer than those of other ranks, and pins offloaded
    ones. So the rows are set again after loading.
    """
    filled = dict[Tensor, nn.Parameter]()
    for name, sharded in model.parameters().items():
        if name in rows:
            zeros = torch.zeros_like(sharded.detach(), device=rows[name].device)
            filled[sharded] = nn.Parameter(zeros, requires_grad=sharded.requires_grad)
            rows[name].data = _local(zeros)
    everywhere = model.module.named_parameters(remove_duplicate=False)
    state = {name: filled[sharded] for name, sharded in everywhere if sharded in filled}
    model.module.load_state_dict(state, strict=False, assign=True)
    for name, sharded in model.parameters().items():
        if name in rows:
            rows[name].data = _local(sharded)


def _local(tensor: Tensor) -> Tensor:
    """This rank's rows of a DTensor, as a view without a copy."""
    assert isinstance(tensor, DTensor)
    return tensor.detach().to_local()


def _bring_gradients(model: "Model", device: str) -> None:
    """Add the reduce-scattered gradient of every backward pass to its sink, as soon as it is available."""
    for name, parameter in model.parameters().items():
        if isinstance(parameter, DTensor) and parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(_bringing(model.sinks[name], device))


def _bringing(sink: GradientSink, device: str) -> Callable[[Tensor], None]:
    def bring(parameter: Tensor) -> None:
        """Runs in the reduce-scatter's stream; torch makes the main stream wait for that stream after backward."""
        assert parameter.grad is not None
        gradient, parameter.grad = _local(parameter.grad), None
        if gradient.device.type != device:
            torch.accelerator.current_stream().synchronize()  # the copy to CPU memory may still be running
        sink.contribute(gradient)

    return bring


def _prefetch(parts: list[nn.Module], ahead: int) -> None:
    """Gather the weights of the next `ahead` units early, in the order of forward, and of backward."""
    for number, part in enumerate(parts):
        assert isinstance(part, FSDPModule)
        part.set_modules_to_forward_prefetch(parts[number + 1 : number + 1 + ahead])
        part.set_modules_to_backward_prefetch(parts[max(0, number - ahead) : number][::-1])


def _run_as_root(model: "Model") -> None:
    """Run this rank's units as an FSDP forward method of the root module, so that backward ends with all gradients."""
    module: Any = model.module
    module.run_units = model.run
    register_fsdp_forward_method(module, "run_units")
    model.run = module.run_units  # type: ignore[method-assign]


def _forget_the_order_of_passes(model: "Model") -> None:
    """Discard the recorded order of forward passes, in a stage without backward passes (no trained parameter up to it).

    Torch records the order of the units' forward passes until a backward pass consumes it. Without a backward pass, the
    record grows until memory is full.
    """
    run = model.run
    units: list[Any] = [part for part in model.module.modules() if isinstance(part, FSDPModule)]
    groups = [group for part in units if (group := part._get_fsdp_state()._fsdp_param_group) is not None]

    def run_and_forget(batch: Mapping[str, Tensor], chunk: int | None = None) -> dict[str, Tensor]:
        values = run(batch, chunk)
        for group in groups:
            group._post_forward_indices.clear()
            group.comm_ctx.post_forward_order.clear()
        return values

    model.run = run_and_forget  # type: ignore[method-assign]
