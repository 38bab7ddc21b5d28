"""One run, as every hook receives it."""

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mplug.config.binding import RunConfig
from mplug.contracts.variance import Variance
from mplug.errors import UsageError, listed
from mplug.layout.mesh import Mesh
from mplug.layout.ranks import Grouping
from mplug.precisions.precision import Precision
from mplug.registry.entry_points import Registry
from mplug.registry.hooks import Hooks
from mplug.registry.precisions import precision_among
from mplug.run.activity import Activity
from mplug.run.toolchain import triton_builds

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

    from mplug.distributed.groups import Groups
    from mplug.run.claim import Claim


@dataclass
class Run:
    """The run that every hook receives. `step` is the number of the current step; the first is 1."""

    config: RunConfig
    hooks: Hooks
    mesh: Mesh
    device: str
    rank: int = 0
    directory: Path | None = None
    step: int = 0
    stop_requested: bool = False
    relayout_requested: bool = False
    """Whether this rank asks for a change of the layout after the current step (`mplug.training.relayouts`)."""
    groups: "Groups | None" = None
    claim: "Claim | None" = None
    """The lock of the directory, on rank 0 of a run that a command has started."""
    shared_folder: bool = True
    """Whether all ranks see the folder of rank 0. Otherwise a plugin joins checkpoints (hook `gather_checkpoints`)."""
    sees_first_folder: bool = True
    """Whether this rank sees the folder of rank 0."""
    activity: Activity = field(default_factory=Activity)
    """What the main thread of this process does."""
    entries: frozenset[str] = frozenset()
    """The optional entries of the loader's micro batches."""
    trains: bool = True
    """Whether the run trains. A command that only runs the model forward sets it to False before it builds the model.

    Such a model has no trained parameter and no optimizer, and nothing is refused or sharded because of one."""
    kept: dict[str, Any] = field(default_factory=dict)
    """What plugins keep in a process beyond the end of its work, by plugin, if it may do the work again (`Healer`)."""
    depends_on_layout: tuple[str, ...] = ()
    """Messages about everything in the run that depends on the layout. Set when a training process is built."""

    def become(self, other: "Run") -> None:
        """Go on as `other`: with its config, plugins and mesh. Process groups of the old mesh must be closed."""
        self.config, self.hooks, self.mesh, self.entries = other.config, other.hooks, other.mesh, other.entries
        for name in ("variances", "precision", "processor"):
            vars(self).pop(name, None)

    def enter(self, activity: str, step: int = 0) -> None:
        """Record that the main thread ends its activity and begins another one (see `Activity`)."""
        self.activity = Activity(activity, step, self.activity.number + 1)
        self.hooks.observe("activity_began", run=self)

    def collectives_begun(self) -> dict[str, dict[str, int]]:
        """By thread and process group: the number of collectives that this process has begun.

        The threads are 'main' and 'saves', which is that of an asynchronous save. A group has the same key on all of
        its ranks. Any thread may call this.
        """
        return self.groups.collectives_begun() if self.groups is not None else {"main": {}, "saves": {}}

    @cached_property
    def variances(self) -> dict[str, Variance]:
        """By plugin label, the declared differences between this run and a run of one process (hook `varies`)."""
        return dict(self.hooks.each("varies", config=self.config))

    @cached_property
    def precision(self) -> Precision:
        """The number formats of the run, from the plugin that `trainer.precision` names."""
        return precision_among(self.hooks.plugins)

    @cached_property
    def processor(self) -> Any:
        """The `mplug_streams.Processor` of the model's streams. UsageError if the model has none."""
        made = self.hooks.call.build_processor(config=self.config)
        if made is None:
            raise UsageError(
                f"{listed(self.hooks.implementers('build_loader'))} supplies samples with media, and "
                f"{listed(self.hooks.implementers('build_model'))} takes none; use a model that does, or data without "
                f"media"
            )
        return made

    def group(self, *axes: str, use: str = "") -> "ProcessGroup | None":
        """The process group of this rank along mesh axes; None if the rank is alone or no processes run yet.

        Collectives of one group wait for each other. A different `use` gives a separate group for the same ranks: then
        a collective that backward needs does not queue behind a gradient sum (axes of two views can have the same
        ranks).

        Collective: all ranks must call it in the same order, because all ranks take part in making a group.
        """
        return None if self.groups is None else self.groups.of(self.mesh.grouping(*axes), use)

    def group_of_cpus(self, *axes: str, use: str) -> "ProcessGroup | None":
        """A group as `group` returns it, for collectives on tensors and objects in the memory of the CPU."""
        return None if self.groups is None else self.groups.of(self.mesh.grouping(*axes), f"{use} (CPU)", "gloo")

    @property
    def compiler(self) -> str | None:
        """The name of torch.compile's backend for the model's units; None leaves them eager.

        'auto' is inductor on a GPU for which it can build kernels.
        """
        backend = self.config.trainer.compile
        if backend == "auto":
            compiles = self.device.startswith("cuda") and triton_builds() and Registry.of_process().table("compilers")
            return "inductor" if compiles else None
        return None if backend == "never" else backend

    @property
    def micro_batch_size(self) -> int:
        """Number of samples of one forward and backward pass on a rank."""
        trainer, (_, shards) = self.config.trainer, self.mesh.batch_shard(self.rank)
        return trainer.micro_batch_size or trainer.global_batch_size // shards

    def micro_batch_counts(self) -> tuple[int, ...]:
        """The numbers of micro batches per rank that the steps of this run have, ascending; several in a ramp-up."""
        trainer, rampup = self.config.trainer, self.config.schedule.batch_rampup
        _, shards = self.mesh.batch_shard(self.rank)
        sizes = {trainer.global_batch_size}
        if rampup.start is not None:
            sizes.update(range(rampup.start, trainer.global_batch_size, rampup.increment))
        return tuple(sorted({-(-size // (shards * self.micro_batch_size)) for size in sizes}))

    @property
    def counts_losses(self) -> bool:
        """Whether the host counts this rank's losses. Of ranks with the same losses, it counts only the first."""
        own = self.mesh.coordinates(self.rank)
        return all(
            own[axis.name] == 0
            for axis in self.mesh.views["dense"]
            if not axis.entries and "units" not in axis.activations
        )

    @property
    def counts_samples(self) -> bool:
        """Whether the host counts this rank's samples. Of ranks that read the same ones, it counts only the first."""
        own = self.mesh.coordinates(self.rank)
        return all(own[axis.name] == 0 for axis in self.mesh.views["dense"] if "batch" not in axis.entries)

    def summed(self, values: "Tensor") -> "Tensor":
        """The sum of a small tensor over all ranks."""
        return self._reduced(values, "SUM")

    def summed_within_worker(self, values: "Tensor") -> "Tensor":
        """The sum of a small tensor over the ranks that train one model: all, unless an axis is independent."""
        return self._reduced(values, "SUM", self.mesh.within_worker)

    def averaged_over_workers(self, values: "Tensor") -> "Tensor":
        """The mean of a small tensor over independent workers; the ranks of one worker have equal values."""
        if not self.mesh.independent:
            return values
        workers = self.mesh.grouping(*self.mesh.independent)
        return self._reduced(values, "SUM", workers) / workers.size

    def largest(self, values: "Tensor") -> "Tensor":
        """The maximum of a small tensor over all ranks."""
        return self._reduced(values, "MAX")

    def _reduced(self, values: "Tensor", operation: str, over: "Grouping | None" = None) -> "Tensor":
        group = None if self.groups is None else self.groups.of(over or self.mesh.everyone)
        if group is None:
            return values
        import torch  # a config needs no torch
        import torch.distributed as dist

        total = values.detach().clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, getattr(dist.ReduceOp, operation), group=group)
        return total

    def gathered(self, value: Any) -> list[Any]:
        """The values of all ranks (small plain data), in rank order."""
        if self.groups is None:
            return [value]
        import torch.distributed as dist

        values: list[Any] = [None] * self.mesh.world_size
        dist.all_gather_object(values, value)
        return values

    @property
    def checkpoints(self) -> Path:
        """The folder of the run's checkpoints."""
        assert self.directory is not None
        return self.directory / "checkpoints"
