"""Placements of the sharded parameters, and refusals of what cannot be sharded."""

from typing import TYPE_CHECKING

from mplug import UsageError
from mplug_sharding import GatheredPlacement

if TYPE_CHECKING:
    from mplug import Model, Run
    from mplug_fsdp.config import FSDPConfig

AXIS = "fsdp"


def divide_rows(run: "Run", model: "Model", config: "FSDPConfig") -> None:
    """Give every parameter that is replicated over the fsdp axis a `GatheredPlacement`, which shards its rows.

    Scalars and parameters in another mesh view (experts, split over their own ranks) keep their placement. The host
    sums their gradients over their own data ranks. Raises UsageError if the pipeline schedule splits backward, or if
    `cpu_offload` is set and some parameter must stay on the device.
    """
    if model.stages.backward == "split":
        raise UsageError(
            "parallel/fsdp frees a unit's weights at the end of its backward pass, and this pipeline schedule computes "
            "weight gradients later; use a schedule that does not split backward, such as 1f1b"
        )
    for name, placement in model.placements.items():
        if AXIS in placement.data_axes and placement.shape:
            model.placements[name] = GatheredPlacement.of(
                placement, AXIS, config.cpu_offload, config.gather == "copies"
            )
    if config.cpu_offload:
        _refuse_what_the_device_must_see(model)


def _refuse_what_the_device_must_see(model: "Model") -> None:
    """With CPU offload, refuse gradients that another axis sums, and a mix of pieces on the CPU and on the device."""
    for name, placement in model.placements.items():
        if placement.gathered_along is None:
            raise UsageError(
                f"parallel.fsdp.cpu_offload=true requires that fsdp shards every parameter of a rank, and it does not "
                f"shard '{name}'; set parallel.fsdp.cpu_offload=false, or remove the strategy that splits '{name}' "
                f"from the layout"
            )
        if placement.data_axes:
            raise UsageError(
                f"parallel.fsdp.cpu_offload=true keeps gradients in CPU memory, where the axis "
                f"'{placement.data_axes[0]}' cannot sum them; give its ranks to fsdp, or set "
                f"parallel.fsdp.cpu_offload=false"
            )
