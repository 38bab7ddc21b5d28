"""Refuse runs that no part of this machine can hold, before a process starts or memory is allocated."""

import os
from typing import TYPE_CHECKING

from mplug.config.sources import source_of
from mplug.errors import UsageError
from mplug.precisions.dtypes import FORMATS
from mplug.run.rank_limit import layout_words
from mplug_estimates.sizes import size_remedy

if TYPE_CHECKING:
    from mplug.distributed.world import World
    from mplug.model.model import Model
    from mplug.run.run import Run

MAX_PROCESSES = 1024
"""Maximum number of processes that one machine starts for a run."""


def refuse_beyond_memory(run: "Run", model: "Model", world: "World | None") -> None:
    """Raise UsageError if this machine cannot hold the minimum that the run needs, before any process starts.

    The minimum consists of the tokens of one micro batch and, if all ranks are on this machine (no launcher), of each
    weight once. A run always needs more, so a run that is refused here could never train.
    """
    config, size = run.config, run.mesh.world_size
    memory = _memory(run.device)
    trainer = config.trainer
    tokens = run.micro_batch_size * trainer.seq_length
    if 3 * 8 * tokens > memory:  # int64 tokens, labels and positions
        fields = "trainer.micro_batch_size" if trainer.micro_batch_size else "trainer.global_batch_size"
        source = source_of(config.settings, tuple(fields.split(".")))
        length = source_of(config.settings, ("trainer", "seq_length"))
        raise UsageError(
            f"{fields} ({source}): a micro batch of {run.micro_batch_size:,} samples of trainer.seq_length="
            f"{trainer.seq_length:,} ({length}) has tokens of {24 * tokens >> 30:,} GiB, and this machine has "
            f"{memory >> 30:,} GiB of memory; set fewer or shorter samples"
        )
    if world is not None:
        return
    if size > MAX_PROCESSES:
        raise UsageError(
            f"{layout_words(config)} needs {size:,} processes, and one machine starts at most {MAX_PROCESSES:,}; "
            f"start them with a launcher on several machines"
        )
    elements = sum(placement.numel for placement in model.placements.values())
    needed = elements * FORMATS[run.precision.weights].bytes
    if needed > memory:
        raise UsageError(
            f"the model has {elements:,} parameters, which take {needed >> 30:,} GiB in {trainer.precision}, and this "
            f"machine has {memory >> 30:,} GiB of memory; {size_remedy(config)}, or use several machines"
        )


def _memory(device: str) -> int:
    """Bytes of memory of this machine: main memory, swap space, and the memory of all its GPUs."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        with open("/proc/swaps", encoding="ascii") as file:
            memory += sum(int(line.split()[2]) << 10 for line in file.read().splitlines()[1:])
    except (OSError, ValueError, IndexError):
        memory *= 2  # the system does not state its swap space; assume as much as main memory
    if device != "cpu":
        import torch

        count = torch.cuda.device_count()
        memory += sum(torch.cuda.get_device_properties(number).total_memory for number in range(count))
    return memory
