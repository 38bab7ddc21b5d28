"""The longest sequence whose step fits into the memory of a GPU, by the estimate of activations."""

from dataclasses import dataclass
from typing import Any

from mplug import UsageError
from mplug.commands import (
    Registry,
    default_settings,
    human_bytes,
    merge,
    overrides,
    prepare,
    read_assignments,
    resolve,
    table,
)

STEP, MOST = 1024, 1 << 27
"""Lengths are multiples of the first, and at most the second."""
CLOSE = 64
"""The search ends within this fraction of the answer: the estimate itself is less exact."""


@dataclass(frozen=True)
class Size:
    """The bytes of the fullest rank with samples of `length` tokens, by their parts: on the GPU, and in CPU memory."""

    length: int
    parts: dict[str, int]
    in_cpu_memory: dict[str, int]

    @property
    def bytes(self) -> int:
        """The sum of all parts on the GPU."""
        return sum(self.parts.values())


def longest(options: dict[str, Any], gib: float) -> str:
    """The longest samples that fit into `gib` GiB on each rank, with the parts of that memory, as text.

    `options` are those of the command. UsageError if the shortest samples do not fit.
    """
    limit = int(gib * 2**30)
    best = _size(options, STEP)
    if best.bytes > limit:
        raise UsageError(
            f"--longest {gib:g}: samples of {STEP:,} tokens need {human_bytes(best.bytes)} already; shard the model "
            f"over more GPUs (docs/parallel.md)"
        )
    high, refused = None, ""
    while high is None or high - best.length > max(STEP, best.length // CLOSE):
        length = 2 * best.length if high is None else (best.length + high) // 2 // STEP * STEP
        if length > MOST:
            break
        try:
            found = _size(options, length)
        except UsageError as reason:
            high, refused = length, str(reason)
            continue
        best, high = (found, high) if found.bytes <= limit else (best, length)
    return _text(best, gib, refused)


def _size(options: dict[str, Any], length: int) -> Size:
    from mplug.commands import IN_CPU_MEMORY, build_model  # imports torch
    from mplug_estimates import (
        estimate_activations,  # imports torch
        measure_bytes,  # imports torch
    )

    changes = merge(overrides(**options), read_assignments([f"trainer.seq_length={length}"]))
    config = resolve(Registry(), default_settings(), changes)
    if config.trainer.compile == "auto":  # as on a GPU
        config = resolve(Registry(), default_settings(), merge(changes, read_assignments(["trainer.compile=inductor"])))
    run = prepare(config)
    model = build_model(run)
    held = measure_bytes(run, model)
    run.device = "cuda"  # activations can move to the CPU
    fullest = max(estimate_activations(run, model), key=lambda stage: stage.expected)
    in_cpu_memory = {IN_CPU_MEMORY: held.pop(IN_CPU_MEMORY, 0), "activations in CPU memory": int(fullest.moved)}
    return Size(length, {**held, **fullest.parts()}, in_cpu_memory)


def _text(best: Size, gib: float, refused: str) -> str:
    counted = {**best.parts, **best.in_cpu_memory}
    rows = [(label, human_bytes(count)) for label, count in counted.items() if count]
    lines = [
        f"samples of {best.length:,} tokens fit into {gib:g} GiB on each rank; the estimate is "
        f"{human_bytes(best.bytes)}, without the buffers of collectives and fragmentation",
        table(("WHAT", "SIZE"), rows),
        *([f"longer samples are refused: {refused}"] if refused else []),
    ]
    return "\n".join(lines)
