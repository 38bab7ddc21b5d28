"""Torch's `fully_shard` over the units of a plan, on a one-dimensional mesh of this rank's data-parallel neighbours.

    at rest         a DTensor whose local tensor is this rank's rows of the fp32 master: the piece that is updated
    in a unit       a plain tensor in the precision of the run, whole but for what tensor parallelism divides
    its gradient    a plain tensor, reduce-scattered as a sum; this rank's rows are added to the sink in fp32

Replicas beside the axis (HSDP) are others' business: they sum sinks, which hold a rank's rows only.
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

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}


@dataclass(frozen=True)
class Options:
    """The strategy's options, and the precision in which units compute."""

    reshard_after_forward: bool
    prefetch: int
    reduce_dtype: str
    cpu_offload: bool
    compute: str


def shard_units(run: "Run", model: "Model", group: "ProcessGroup", options: Options) -> None:
    """Put the gathered parameters of each unit of this rank into torch's care; sinks and pieces keep the rows."""
    mesh = DeviceMesh.from_group(group, run.device, mesh_dim_names=(AXIS,))
    rows = _take_rows(run, model)
    units = _units_by_weights(model)
    arguments: dict[str, Any] = {
        "mesh": mesh,
        "reshard_after_forward": options.reshard_after_forward,
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=DTYPES[options.compute], reduce_dtype=_reduce_dtype(options), cast_forward_inputs=False
        ),
        "offload_policy": CPUOffloadPolicy(pin_memory=run.device == "cuda") if options.cpu_offload else OffloadPolicy(),
        "ignored_params": {one for one in model.module.parameters() if not one.is_meta},
    }
    for parts in units:
        fully_shard(parts if len(parts) > 1 else parts[0], **arguments)
    fully_shard(model.module, **arguments)  # it has no parameters of its own: it makes the units' streams common
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
    if not model.learning(run.mesh.index(run.rank, model.stages.axis) + 1):
        _forget_the_order_of_passes(model)


def _reduce_dtype(options: Options) -> torch.dtype:
    """The dtype in which gradients are summed over ranks: fp64 in a run in fp64, unless the user chose bf16."""
    chosen = DTYPES[options.reduce_dtype]
    return chosen if chosen is torch.bfloat16 else torch.promote_types(chosen, DTYPES[options.compute])


def _take_rows(run: "Run", model: "Model") -> dict[str, nn.Parameter]:
    """This rank's rows by name; in the module, parameters without memory stand for the whole ones."""
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
    """This rank's units in order; those that share a parameter together, for it is gathered once for all of them."""
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
    """Give the sharded parameters their memory, where the rows were, and the sinks that memory for their rows.

    Torch pads a stretch that is shorter than others', and pins what is offloaded: only afterwards it is where it stays.
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
    """This rank's rows of a DTensor, the memory itself."""
    assert isinstance(tensor, DTensor)
    return tensor.detach().to_local()


def _bring_gradients(model: "Model", device: str) -> None:
    """Add every pass's reduce-scattered gradient to its sink, as soon as it is there."""
    for name, parameter in model.parameters().items():
        if isinstance(parameter, DTensor) and parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(_bringing(model.sinks[name], device))


def _bringing(sink: GradientSink, device: str) -> Callable[[Tensor], None]:
    def bring(parameter: Tensor) -> None:
        """Called in the stream of the reduce-scatter, for which torch lets the main stream wait after backward."""
        assert parameter.grad is not None
        gradient, parameter.grad = _local(parameter.grad), None
        if gradient.device.type != device:
            torch.accelerator.current_stream().synchronize()  # the copy to the host's memory may be under way
        sink.contribute(gradient)

    return bring


def _prefetch(parts: list[nn.Module], ahead: int) -> None:
    """Gather the weights of so many units ahead, in the order of the passes."""
    for number, part in enumerate(parts):
        assert isinstance(part, FSDPModule)
        part.set_modules_to_forward_prefetch(parts[number + 1 : number + 1 + ahead])
        part.set_modules_to_backward_prefetch(parts[max(0, number - ahead) : number][::-1])


def _run_as_root(model: "Model") -> None:
    """Make a pass through this rank's units one of the module's own, which ends when all gradients are there."""
    module: Any = model.module
    module.run_units = model.run
    register_fsdp_forward_method(module, "run_units")
    model.run = module.run_units  # type: ignore[method-assign]


def _forget_the_order_of_passes(model: "Model") -> None:
    """Keep nothing of forward passes, for a stage that has no backward pass because nothing before its end is trained.

    Torch notes the order of all units' forward passes until backward has followed it: here, until memory is full.
    """
    run = model.run
    units: list[Any] = [part for part in model.module.modules() if isinstance(part, FSDPModule)]
    groups = [group for part in units if (group := part._get_fsdp_state()._fsdp_param_group) is not None]

    def run_and_forget(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        values = run(batch)
        for group in groups:
            group._post_forward_indices.clear()
            group.comm_ctx.post_forward_order.clear()
        return values

    model.run = run_and_forget  # type: ignore[method-assign]
