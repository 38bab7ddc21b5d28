"""Compares the memory that a run needs, activations included, with what its machine has, before the run starts."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mplug.config.sources import source_of
from mplug.errors import UsageError, listed
from mplug.model.slots.offers import RECOMPUTING
from mplug.model.updates import IN_CPU_MEMORY
from mplug.precisions.dtypes import FORMATS
from mplug.registry.entry_points import Registry
from mplug_estimates.activations import LABELS, Activations, estimate_activations
from mplug_estimates.measured import measure_bytes
from mplug_estimates.memory_limits import host_memory

if TYPE_CHECKING:
    from mplug.distributed.world import World
    from mplug.model.model import Model
    from mplug.run.run import Run

SETTING = "trainer.memory_check"
PROCESS = 512 << 20
"""Bytes that a process takes before it has a model: Python and torch."""
NAMED_PARTS = 3
"""Number of parts that a message names."""
PER_ELEMENT = 24
"""Bytes per element above what any run keeps: weight, master, gradient, two states, all in fp32, and copies."""
CLEARLY = 4
"""An estimate this many times below what is available needs no exact count of weights and states."""


@dataclass(frozen=True)
class Need:
    """Bytes that the ranks which share one memory need: at least, and by the estimate; `parts` are of one rank."""

    certain: int
    expected: int
    parts: Mapping[str, int]


@dataclass(frozen=True)
class Memory:
    """The memory that the ranks share: in all, and what of it is free now; `name` is what has it."""

    total: int
    available: int
    name: str


def check_memory(run: "Run", model: "Model", world: "World | None") -> list[str]:
    """Raise UsageError if the run surely needs more memory than there is; return a warning if it probably does.

    The setting `trainer.memory_check` makes the refusal a warning ('warn'), or leaves out the check ('off').
    """
    setting = run.config.trainer.memory_check
    if setting == "off" or (memory := _memory(run)) is None:
        return []
    stages = estimate_activations(run, model)
    if _clearly_fits(run, model, stages, memory, _sharing(run, world)):
        return []
    need = needed(run, model, stages, world)
    if need.certain > memory.total:
        message = (
            f"the run needs at least {_gib(need.certain)} of memory, probably {_gib(need.expected)}, and {memory.name} "
            f"has {_gib(memory.total)}; {_details(run, model, need)}"
        )
        if setting == "refuse":
            raise UsageError(f"{message}; or set {SETTING}=warn to start it all the same")
        return [message]
    if need.expected > memory.available:
        return [
            f"the run may exceed the memory: the estimate is {_gib(need.expected)}, and {memory.name} has "
            f"{_gib(memory.available)} available; {_details(run, model, need)}"
        ]
    return []


def needed(run: "Run", model: "Model", stages: list[Activations], world: "World | None") -> Need:
    """What the ranks that share one memory need. The model is given tensors without memory."""
    sharing, on_cpu = _sharing(run, world), run.device == "cpu"
    own = stages[run.mesh.index(run.rank, model.stages.axis) if model.stages.axis else 0]
    held = measure_bytes(run, model)
    if not on_cpu:
        held.pop(IN_CPU_MEMORY, None)
    sure = 0 if model.engine is not None else sum(held.values()) if on_cpu else _weights(run, model)
    largest = max(stages, key=lambda stage: stage.expected)
    mean = sum(stage.certain for stage in stages) // len(stages)
    if not on_cpu:  # each rank has a GPU of its own
        expected = sum(held.values()) + largest.expected
        return Need(sure + own.certain, expected, {**held, **largest.parts()})
    least = mean if world is None else min(stage.certain for stage in stages)
    middle = sum(stage.expected for stage in stages) // len(stages) if world is None else own.expected
    expected = sharing * (PROCESS + sum(held.values()) + middle)
    # Stages hold different weights, so only activations are sure of all ranks.
    certain = sharing * least + (sure if len(stages) > 1 else sharing * sure)
    return Need(certain, expected, {**held, **largest.parts()})


def _clearly_fits(run: "Run", model: "Model", stages: list[Activations], memory: Memory, sharing: int) -> bool:
    """Whether even a generous estimate is far below the memory: then nothing is counted exactly, which takes longer."""
    elements = sum(placement.numel for placement in model.placements.values())
    each = PROCESS + PER_ELEMENT * elements + max(stage.expected for stage in stages)
    return CLEARLY * sharing * each < memory.available


def _sharing(run: "Run", world: "World | None") -> int:
    """The number of ranks that share one memory."""
    if run.device != "cpu":
        return 1
    return run.mesh.world_size if world is None else world.local_size or 1


def _weights(run: "Run", model: "Model") -> int:
    """Bytes of the weights that stay on the device of this rank."""
    kept = (placement for name, placement in model.placements.items() if name in model.parameters())
    elements = sum(_elements(placement.local_shape(run.rank)) for placement in kept if not placement.offloaded)
    return elements * FORMATS[run.precision.weights].bytes


def _elements(shape: tuple[int, ...]) -> int:
    found = 1
    for length in shape:
        found *= length
    return found


def _memory(run: "Run") -> Memory | None:
    """The memory of the device; None if the system does not state it."""
    if run.device != "cpu":
        import torch

        total = min(
            torch.cuda.get_device_properties(number).total_memory for number in range(torch.cuda.device_count())
        )
        return Memory(total, total, "a GPU of this machine")
    found = host_memory()
    if found.total is None or found.available is None or found.swap is None:
        return None
    return Memory(found.total + found.swap, found.available + found.swap, found.source)


def _details(run: "Run", model: "Model", need: Need) -> str:
    """The largest parts, and what makes them smaller."""
    parts = sorted(need.parts.items(), key=lambda part: -part[1])[:NAMED_PARTS]
    config, trainer, size = run.config, run.config.trainer, run.micro_batch_size
    named = listed([f"{_gib(count)} of {label}" for label, count in parts])
    length = source_of(config.settings, ("trainer", "seq_length"))
    shape = f"with micro batches of {size:,} x {trainer.seq_length:,} tokens{f' ({length})' if length else ''}"
    is_recomputed = any(wrap.layer >= RECOMPUTING for filled in model.unit_wraps for wrap in filled.wraps)
    remedies = [
        *(["set a smaller trainer.micro_batch_size"] if size > 1 else []),
        *([] if is_recomputed else [f"recompute activations ({_memory_plugins()})"]),
        "set a smaller trainer.seq_length",
        "divide the sequence over more GPUs or machines (context parallelism)",
    ]
    if sum(need.parts.values()) > 2 * _activations(need):
        remedies = ["use a smaller model", "shard it over more GPUs or machines (docs/parallel.md)"]
    return f"the largest parts of a rank, {shape}: {named}; {', '.join(remedies[:-1])}, or {remedies[-1]}"


def _memory_plugins() -> str:
    """How to name an installed plugin that keeps fewer activations."""
    names = Registry.of_process().names("memory")
    return f"a plugin of the kind 'memory', here {listed(names)}: docs/memory.md" if names else "docs/memory.md"


def _activations(need: Need) -> int:
    """The bytes of activations among the parts."""
    return sum(count for label, count in need.parts.items() if label in LABELS)


def _gib(count: int) -> str:
    return f"{count / 2**30:,.1f} GiB"
