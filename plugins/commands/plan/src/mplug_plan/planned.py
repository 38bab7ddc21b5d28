"""One planned run: its settings, what it holds, and how long its step takes."""

from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from mplug import UsageError
from mplug.commands import (
    IN_CPU_MEMORY,
    Registry,
    Settings,
    build_model,
    default_settings,
    from_mapping,
    merge,
    prepare,
    read_assignments,
    resolve,
)
from mplug_estimates import estimate_activations, measure_bytes
from mplug_plan.kernels import Kernels
from mplug_plan.step_time import Step, predict

if TYPE_CHECKING:
    from mplug import Model, Run
    from mplug_plan.machine import Machine

RESERVED = 3.0
"""GiB of a GPU that the run's tensors cannot use: CUDA's context, buffers of NCCL, fragments."""
FP32 = 4
SCAN = "Scan.core"
"""The slot of scans, whose rate no limit states."""
USUAL, GENERAL = "sdpa", "flex"
"""The kernels that stand for attention kernels of GPUs on a machine without one: that of most models, and of all."""
PLAN = "plan"
"""The source of settings that the plan chooses, in messages of the host."""


@dataclass(frozen=True)
class Planned:
    """A run that the host accepts. `assignments` are what the plan adds to the user's settings.

    `held` are the bytes of a rank between steps, `activations` those of the rank that needs the most.
    """

    layout: str
    assignments: tuple[str, ...]
    micro_batch_size: int
    micro_batches: int
    held: dict[str, int]
    activations: dict[str, int]
    memory: float
    step: Step
    tokens: int
    flops: float
    gpus: int

    @property
    def seconds(self) -> float:
        """The seconds of a step."""
        return self.step.seconds

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second and GPU."""
        return self.tokens / self.seconds / self.gpus

    def mfu(self, peak: float) -> float:
        """The share of the peak that the model's FLOPs take (causal attention counted once)."""
        return self.flops / self.seconds / self.gpus / peak


class Built:
    """A run and its model on the meta device, as the host builds them, with what it holds."""

    def __init__(self, planner: "Planner", layout: str, assignments: tuple[str, ...]) -> None:
        self.planner, self.layout, self.assignments = planner, layout, assignments
        self.run = planner.prepared(layout, assignments)
        self.model: Model = build_model(self.run)
        self._held: dict[str, int] | None = None
        scans = sum(slot.site.slot == SCAN for slot in self.model.slots)
        planner.unknown = f"the scans of {scans} blocks of a stage" if scans else ""

    def planned(self, micro_batch_size: int | None = None, exact: bool = False) -> Planned:
        """What the run needs with a size of micro batches; None: the size of the settings.

        `exact` counts the bytes between steps in a build of tensors without memory; otherwise they follow from the
        placements, which is faster.
        """
        planner, run, more = self.planner, self.run, self.assignments
        if micro_batch_size is not None:
            more = (*more, f"trainer.micro_batch_size={micro_batch_size}")
            run = planner.prepared(self.layout, more)
            run.device = self.run.device
        # A machine without GPUs moves no activations to the memory of the CPU; the planned run does.
        stages = estimate_activations(replace(run, device="cuda"), self.model, planner.kernels.supplied)
        largest = max(stages, key=lambda stage: stage.expected)
        held = self._held_with(run, exact)
        step = predict(run, self.model, planner.machine, planner.kernels, held)
        held.pop(IN_CPU_MEMORY, None)
        trainer = run.config.trainer
        samples, length = trainer.global_batch_size, trainer.seq_length
        return Planned(
            layout=self.layout,
            assignments=more,
            micro_batch_size=run.micro_batch_size,
            micro_batches=step.micro_batches,
            held=held,
            activations=largest.parts(),
            memory=sum(held.values()) + largest.expected,
            step=step,
            tokens=samples * length,
            flops=self.model.flops.of(samples * length, samples * length**2),
            gpus=run.mesh.world_size,
        )

    def _held_with(self, run: "Run", exact: bool) -> dict[str, int]:
        """The bytes that are held; micro batches change only the format of gradients."""
        if not exact:
            return single_gradients(run, self.model, self._counted())
        if self._held is None:
            self._held = dict(measure_bytes(self.run, self.model))
        return single_gradients(run, self.model, self._held)

    def _counted(self) -> dict[str, int]:
        """What `measure_bytes` would count, from the placements: it omits padding and buffers of suppliers."""
        model, rank, precision = self.model, self.run.rank, self.run.precision
        master, weight = precision.master_dtype.itemsize, precision.weight_dtype.itemsize
        sharding = model.sharding
        sharded = {name for bucket in (sharding.buckets if sharding else ()) for name in bucket.names}
        owned = sum(bucket.num_owned for bucket in sharding.buckets) if sharding else 0
        found = {"weights": 0, "masters": 0, "gradients": 0, "optimizer state": 0}
        for name in model.parameters():
            placement = model.placements[name]
            local = prod(placement.local_shape(rank))
            if not placement.parameter.trainable:
                found["frozen weights"] = found.get("frozen weights", 0) + weight * local
                continue
            is_master = placement.gathered_along is not None
            found["weights"] += local * (master if is_master else weight)
            found["gradients"] += 0 if name in sharded and sharding and sharding.transient else local * master
            if name not in sharded:
                owned += local
                found["masters"] += 0 if is_master or master == weight else local * master
        shards = sum(bucket.num_owned for bucket in sharding.buckets) if sharding else 0
        found["masters"] += shards * master
        found["gradients"] += shards * master if sharding and sharding.transient else 0
        found["optimizer state"] = int(owned * self.planner.state_bytes)
        return {name: size for name, size in found.items() if size}


def single_gradients(run: "Run", model: "Model", held: Mapping[str, int]) -> dict[str, int]:
    """What a rank holds on a GPU: AdamW accepts gradients in the format of the run there, if nothing is added to them.

    On a CPU, `measure_bytes` counts them in the format of the masters.
    """
    trainer, precision = run.config.trainer, run.precision
    is_summed = (
        max(run.micro_batch_counts()) > 1
        or any(axis.entries and axis.size > 1 for axis in run.mesh.axes.values())
        or bool(model.plan.tied)
    )
    accepts = run.hooks.implementers("build_optimizer") == ["optimizers/adamw"]
    if run.device != "cpu" or is_summed or not accepts or trainer.gradients != "auto" or "gradients" not in held:
        return dict(held)
    share = precision.gradient_dtype.itemsize / precision.master_dtype.itemsize
    return {**held, "gradients": int(held["gradients"] * share)}


class Planner:
    """Builds runs of a config on a number of GPUs of a machine, as `mplug train` would, without starting them."""

    def __init__(self, settings: Settings, machine: "Machine", gpus: int | None) -> None:
        self.machine, self.gpus = machine, gpus
        self.settings = settings
        self._defaults = default_settings()
        self._chosen = {
            key[1]: one.value
            for key, one in merge(self._defaults, settings).items()
            if len(key) == 2 and key[0] == "kernels" and isinstance(one.value, str | list | None)
        }
        self.kernels = Kernels.of(self._chosen, keeps_weights=self.value("kernels", "fp8", "keep_weights") is True)
        self.state_bytes = 2.0 * FP32
        """Bytes of the optimizer's state for each element that a rank owns; the search measures them."""
        self.unknown = ""
        """Work of the model whose time is not predicted; empty if there is none."""
        self._registry = Registry()

    def prepared(self, layout: str, assignments: tuple[str, ...] = ()) -> "Run":
        """The prepared run of a layout. UsageError if the host refuses it."""
        settings = merge(self.settings, self._as_on_a_gpu(layout))
        settings = merge(settings, read_assignments([f"parallel.layout={layout}", *assignments], PLAN))
        return prepare(resolve(self._registry, self._defaults, settings), world_size=self.gpus)

    def prepared_alone(self, attention: str | None = None) -> "Run":
        """The prepared run of one process; see `_as_on_a_gpu` for `attention`."""
        settings = merge(self.settings, self._as_on_a_gpu("", attention))
        settings = merge(settings, read_assignments(["parallel.layout="], PLAN))
        return prepare(resolve(self._registry, self._defaults, settings))

    def alone(self) -> Built:
        """The built run of one process with micro batches of one sample."""
        one = copy(self)
        one.gpus = 1
        return Built(one, "", ("trainer.micro_batch_size=1",))

    def built(self, layout: str, assignments: tuple[str, ...] = ()) -> Built:
        """The built run of a layout. UsageError if the host refuses it."""
        return Built(self, layout, assignments)

    @property
    def limit(self) -> float:
        """The bytes that a run may need."""
        return self.machine.memory - RESERVED * 2**30

    def is_set(self, *key: str) -> bool:
        """Whether the user set a field."""
        return key in self.settings

    def value(self, *key: str) -> Any:
        """The value of a field that the user set; None if it is not set."""
        found = self.settings.get(key)
        return None if found is None else found.value

    @cached_property
    def _attention(self) -> str:
        """The kernel that stands for an attention kernel of GPUs."""
        try:
            build_model(self.prepared_alone(USUAL))
        except UsageError:  # if it has another cause, the next build raises it again
            return GENERAL
        return USUAL

    def _as_on_a_gpu(self, layout: str, attention: str | None = None) -> Settings:
        """Settings that make the host build on this machine what it would build on GPUs.

        Kernels that need a GPU are left out, because no machine without one can check them; `attention` stands for
        those of attention.
        """
        import torch

        if torch.cuda.is_available():
            return {}
        found: dict[str, Any] = {"trainer": {"device": "cpu"}}
        if self.value("trainer", "compile") in (None, "auto"):
            found["trainer"]["compile"] = "inductor"
        if self.kernels.assumed:
            attention = attention or self._attention
            found["kernels"] = {
                kind: attention if kind in ("default", "attention") else None
                for kind, name in self._chosen.items()
                if not {*(name if isinstance(name, list) else [name])}.isdisjoint(self.kernels.assumed)
            }
        if "tp" in layout and not self.is_set("parallel", "tp", "overlap"):
            found["parallel"] = {"tp": {"overlap": True}}
        replaced = [
            f"{one['field']}={one['instead']}"
            for one in yaml.safe_load(Path(__file__).with_name("on_gpus.yaml").read_text(encoding="utf-8"))
            if self.value(*one["field"].split(".")) == one["value"]
        ]
        return merge(from_mapping(found, PLAN), read_assignments(replaced, PLAN))


def refusal(error: UsageError) -> str:
    """The first sentence of a refusal, in one line."""
    return " ".join(str(error).splitlines()[0].split())
