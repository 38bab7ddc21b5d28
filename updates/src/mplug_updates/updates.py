"""What the host asks about the updates of a run (`mplug.model.updates.Updates`)."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from mplug.commands import IN_CPU_MEMORY
from mplug.contracts.optimizer import Optimizer, Piece
from mplug.contracts.stepper import Stepper
from mplug.model.model import Model
from mplug.run.run import Run
from mplug_updates.averaged_optimizer import refuse_average
from mplug_updates.first_weights import FirstWeights, refuse_recalled
from mplug_updates.grouped_optimizer import build_optimizer, refuse_single
from mplug_updates.grouping import grouped
from mplug_updates.offloaded_optimizer import OffloadedOptimizer, refuse_offload
from mplug_updates.recalling import recalling

if TYPE_CHECKING:
    from mplug.distributed.groups import Groups


class Updates:
    """The class of the entry-point group 'mplug.updates'."""

    def grouped(self, run: Run, model: Model) -> Mapping[str, int]:
        """The number of the group of each trained parameter that has one."""
        return grouped(model, run.config)

    def refuse_plugins(self, run: Run, model: Model) -> None:
        """Raise UsageError if a plugin cannot build several optimizers."""
        refuse_single(run, model)

    def refuse(self, run: Run, model: Model) -> None:
        """Raise UsageError if the layout has no averages, no states in CPU memory, or no first weights."""
        refuse_average(run, model)
        refuse_offload(run, model)
        refuse_recalled(run, model)

    def optimizer(self, run: Run, model: Model, pieces: list[Piece], groups: "Groups | None") -> Optimizer:
        """The optimizer of all pieces."""
        return build_optimizer(run, model, pieces, groups)

    def num_bytes(self, optimizer: Optimizer) -> Mapping[str, int]:
        """The bytes of offloaded states: in the memory of the CPU, and of the chunks on the device."""
        first, inner = (optimizer, optimizer.inner) if isinstance(optimizer, FirstWeights) else (None, optimizer)
        if not isinstance(inner, OffloadedOptimizer):
            return {}
        in_cpu, in_chunks = inner.num_bytes
        storages = {
            one.untyped_storage()._cdata: one for one in (first.tensors() if first is not None else ())
        }.values()
        on_device = sum(tensor.untyped_storage().nbytes() for tensor in storages)
        return {"optimizer state": on_device, IN_CPU_MEMORY: in_cpu, "chunks of optimizer state": in_chunks}

    def stepper(self, run: Run, model: Model, pieces: list[Piece], optimizer: Optimizer, stepper: Stepper) -> Stepper:
        """The stepper; around it, one that computes the recalled entries if the plan has some."""
        return recalling(run, model, pieces, optimizer, stepper)
