"""Which parameters are divided, and what cannot be."""

from typing import TYPE_CHECKING

from mplug import GatheredPlacement, UsageError

if TYPE_CHECKING:
    from mplug import Model, Run

AXIS = "fsdp"


def divide_rows(run: "Run", model: "Model", in_host_memory: bool) -> None:
    """Give every parameter that the axis' ranks hold alike a placement that divides its rows over them.

    What lies in another view of the mesh (experts, divided over their own ranks) stays as it is: its gradient is summed
    over its own data ranks by the host.
    """
    if model.stages.backward == "split":
        raise UsageError(
            "parallel/fsdp sums a unit's gradients and frees its weights at the end of its backward pass, and this "
            "pipeline schedule computes gradients of weights later; use a schedule that does not split backward, such "
            "as 1f1b"
        )
    for name, placement in model.placements.items():
        if AXIS in placement.data_axes and placement.shape:
            model.placements[name] = GatheredPlacement.of(placement, AXIS, in_host_memory)
    if in_host_memory:
        _refuse_what_the_device_must_see(model)


def _refuse_what_the_device_must_see(model: "Model") -> None:
    """Whoever sums gradients further, or steps two devices' pieces at once, needs them where the others are."""
    for name, placement in model.placements.items():
        if placement.gathered_along is None:
            raise UsageError(
                f"parallel.fsdp.cpu_offload keeps all of a rank's parameters in the host's memory, and "
                f"'{name}' is not divided by fsdp; set it to false, or leave out what divides '{name}'"
            )
        if placement.data_axes:
            raise UsageError(
                f"parallel.fsdp.cpu_offload keeps gradients in the host's memory, where {placement.data_axes[0]} "
                f"cannot sum them; give its ranks to fsdp, or set parallel.fsdp.cpu_offload=false"
            )
