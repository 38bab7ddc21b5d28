"""Builds DeepSpeed's engine around the units of a model, on the processes and groups of the run."""

import os
import warnings
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mplug import WeightExchange
from mplug_deepspeed.files import StatesInFiles, move_weights
from mplug_deepspeed.partitions import Partitions

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from mplug import Model, Run
    from mplug_deepspeed.settings import Settings


class Units(nn.Module):
    """This rank's units as one module, which DeepSpeed calls without arguments.

    DeepSpeed looks for tensors in arguments and results. It would not understand mappings, so the entries of a micro
    batch and the activations of its pass are attributes.
    """

    def __init__(self, model: "Model") -> None:
        super().__init__()
        self.module = model.module
        self.run = model.run
        self.entries: Mapping[str, Tensor] = {}
        self.values: Mapping[str, Tensor] = {}

    def forward(self) -> Tensor:
        """The loss of the micro batch in `entries`."""
        self.values = self.run(self.entries)
        return self.values["loss"]


class Update(torch.optim.Optimizer):
    """The optimizer that DeepSpeed receives: its step is a function that the stepper sets.

    DeepSpeed replaces the parameters by its flat partitions, and calls `step` once for each of them.
    """

    def __init__(self, parameters: list[nn.Parameter], lr: float) -> None:
        super().__init__(parameters, {"lr": lr})
        self.on_step: Callable[[list[Tensor]], None] | None = None

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Hand the partitions whose gradients are set to the stepper."""
        assert self.on_step is not None
        self.on_step([flat for group in self.param_groups for flat in group["params"]])


@dataclass
class Running:
    """A built engine, and what belongs to it."""

    engine: Any
    units: Units
    update: Update
    partitions: Partitions
    ranks: int
    """The number of data-parallel ranks, by which DeepSpeed divides gradients."""
    own_world: bool

    def close(self) -> None:
        """Remove DeepSpeed's hooks and groups."""
        self.engine.destroy()
        if self.own_world:
            dist.destroy_process_group()


class Groups:
    """The object `mpu` by which DeepSpeed asks for groups and ranks; tensor parallelism is its "model" parallelism."""

    def __init__(self, data: "ProcessGroup", others: "ProcessGroup | None") -> None:
        self.data, self.others = data, others

    def get_data_parallel_group(self) -> "ProcessGroup":
        """The ranks over which gradients are summed and states are sharded."""
        return self.data

    def get_data_parallel_group_ranks(self) -> list[int]:
        """Their ranks."""
        return dist.get_process_group_ranks(self.data)

    def get_data_parallel_world_size(self) -> int:
        """Their number."""
        return self.data.size()

    def get_data_parallel_rank(self) -> int:
        """This rank's number among them."""
        return self.data.rank()

    def get_model_parallel_group(self) -> "ProcessGroup | None":
        """The ranks that compute the same samples; None if this rank is alone."""
        return self.others

    def get_model_parallel_world_size(self) -> int:
        """Their number."""
        return 1 if self.others is None else self.others.size()

    def get_model_parallel_rank(self) -> int:
        """This rank's number among them."""
        return 0 if self.others is None else self.others.rank()

    get_tensor_model_parallel_group = get_model_parallel_group
    get_tensor_model_parallel_world_size = get_model_parallel_world_size
    get_tensor_model_parallel_rank = get_model_parallel_rank


def start(run: "Run", model: "Model", settings: "Settings") -> Running:
    """Build the engine, supply its pieces to the host, and let `model.run` call it."""
    own_world = _join_world(run)
    assert model.sharding is not None
    axes = model.sharding.buckets[0].axes
    ranks = prod(run.mesh.axes[axis].size for axis in axes)
    groups = Groups(*_groups(run, axes))
    trained = [parameter for parameter in model.parameters().values() if parameter.requires_grad]
    for parameter in trained:
        parameter.model_parallel = True  # type: ignore[attr-defined]  # so that every rank looks for overflows
    units, update = Units(model), Update(trained, run.config.optimizer.lr)
    inner = _inside_units(model)
    _set_environment(run)
    folder = settings.folder("offload_optimizer")
    with nullcontext() if folder is None else StatesInFiles(folder):
        engine = _initialize(units, update, groups, settings.effective(run, ranks))
    if settings.stage == 3:
        _gather_by_units(model, inner)
    if (folder := settings.folder("offload_param")) is not None:
        move_weights(engine.optimizer, folder)
    partitions = Partitions(run, model, engine.optimizer, settings.stage)
    model.supply(partitions.pieces)
    model.sinks.reduced_over.update(axes)
    model.exchanges.append(WeightExchange(begin=partitions.write_weights, wait=None))

    def run_units(batch: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        units.entries = batch
        engine()
        return units.values

    model.run = run_units  # type: ignore[method-assign,assignment]
    return Running(engine, units, update, partitions, ranks, own_world)


def _initialize(units: Units, update: Update, groups: Groups, config: dict[str, Any]) -> Any:
    """DeepSpeed's engine."""
    import deepspeed  # takes seconds, so that only runs with this strategy pay for it
    from deepspeed.utils import logger

    logger.setLevel(config.get("log_level", "error").upper())
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)  # DeepSpeed calls them
    # DeepSpeed would build an operator for collectives in shared memory, which takes a compiler and half a minute.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    engine, *_ = deepspeed.initialize(
        model=units, optimizer=update, config=config, mpu=groups, dist_init_required=False
    )
    return engine


def _set_environment(run: "Run") -> None:
    """Set the variables by which DeepSpeed chooses its device, now and while it runs."""
    os.environ.setdefault("DS_ACCELERATOR", run.device)
    if run.device == "cuda":
        os.environ["LOCAL_RANK"] = str(torch.cuda.current_device())
    os.environ.setdefault("LOCAL_RANK", "0")


def _join_world(run: "Run") -> bool:
    """Make a world of this process alone if the run has no other; DeepSpeed needs one. Whether it has made one."""
    if dist.is_initialized():
        return False
    backend = "nccl" if run.device == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return True


def _groups(run: "Run", axes: tuple[str, ...]) -> "tuple[ProcessGroup, ProcessGroup | None]":
    """(the group over which gradients are summed, the group of the other ranks that compute the same samples)."""
    others = tuple(axis.name for axis in run.mesh.views["dense"] if axis.name not in axes)
    data, same = run.group(*axes), run.group(*others) if others else None
    if data is None:
        for rank in range(run.mesh.world_size):  # every rank takes part in making each group
            group = dist.new_group([rank])
            data = group if rank == run.rank else data
    assert data is not None
    return data, same


Hooks = list[tuple[nn.Module, set[int], set[int]]]


def _inside_units(model: "Model") -> Hooks:
    """The modules inside of units, with the keys of the hooks that they have before DeepSpeed adds its own."""
    units = [model.module.get_submodule(unit.name) for unit in model.own_units]
    inner = {part for unit in units for part in unit.modules()} - set(units)
    return [(part, set(part._forward_pre_hooks), set(part._forward_hooks)) for part in inner]


def _gather_by_units(model: "Model", inner: Hooks) -> None:
    """Let stage 3 gather the weights of a unit as a whole, when the unit is called.

    DeepSpeed hooks every module, and modules of mplug read the weights of the modules inside of them without calling
    those. Its own mark for this, a leaf module, reduces gradients before they exist if a unit's input has no gradient.
    So the mark is set after DeepSpeed has hooked the gradients of parameters, and the inner hooks are removed.
    """
    from deepspeed.utils import set_z3_leaf_module

    for part, before, after in inner:
        for hooks, kept in ((part._forward_pre_hooks, before), (part._forward_hooks, after)):
            for key in set(hooks) - kept:
                del hooks[key]
    for unit in model.own_units:
        set_z3_leaf_module(model.module.get_submodule(unit.name), True)
