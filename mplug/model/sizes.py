"""Refuse sizes that no machine can hold, before a process starts or memory is allocated."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from mplug.config.binding import RunConfig
from mplug.config.family import Contained
from mplug.config.sources import source_of
from mplug.errors import UsageError
from mplug.precisions.dtypes import FORMATS
from mplug.run.rank_limit import layout_words

if TYPE_CHECKING:
    from mplug.distributed.world import World
    from mplug.model.model import Model
    from mplug.run.run import Run

MAX_SUBMODULES = 1 << 14
"""Maximum number of submodules of one module, such as the list of blocks: more than any network has."""
MAX_ELEMENTS = 1 << 54
"""Maximum number of parameters of a model: a thousand times the largest."""
MAX_PROCESSES = 1024
"""Maximum number of processes that one machine starts for a run."""


@contextmanager
def within_reason(config: RunConfig, label: str) -> Iterator[None]:
    """Wrap a block in which a plugin builds a model on the meta device: UsageError as soon as the model is too large.

    A billion layers on the meta device still take days of Python time. So each parameter and each submodule is counted
    when it is registered, and the build ends at the limit. Torch itself refuses a tensor whose size overflows.
    """
    from torch import nn
    from torch.nn.modules import module as registering

    elements = 0

    def count_parameter(owner: nn.Module, name: str, parameter: Any) -> None:
        nonlocal elements
        elements += 0 if parameter is None else parameter.numel()
        if elements > MAX_ELEMENTS:
            raise _TooLargeError(f"its parameters have more than {MAX_ELEMENTS:,} elements")

    def count_part(owner: nn.Module, name: str, part: Any) -> None:
        if len(owner._modules) > MAX_SUBMODULES:
            raise _TooLargeError(f"one of its modules has more than {MAX_SUBMODULES:,} submodules")

    handles = (
        registering.register_module_parameter_registration_hook(count_parameter),
        registering.register_module_module_registration_hook(count_part),
    )
    try:
        yield
    except _TooLargeError as error:
        raise UsageError(f"the model of {label} is too large: {error}; {_size_remedy(config)}") from None
    except (RuntimeError, OverflowError, TypeError, ValueError, MemoryError) as error:
        if not _is_about_size(error):
            raise
        raise UsageError(
            f"the model of {label} is too large: torch cannot count the elements of a tensor; {_size_remedy(config)}"
        ) from error
    finally:
        for handle in handles:
            handle.remove()


class _TooLargeError(Exception):
    """A model has exceeded a limit while it was built."""


def _is_about_size(error: Exception) -> bool:
    """Whether torch or Python says that a size overflows."""
    words = ("overflow", "out of range", "too large", "too big", "can't allocate", "cannot allocate")
    return isinstance(error, OverflowError | MemoryError) or any(word in str(error).lower() for word in words)


def _size_remedy(config: RunConfig) -> str:
    """The remedy for a model that is too large: it names the largest integer of the section 'model'."""
    sizes = list(_integers(config.model, "model"))
    if not sizes:
        return "set smaller sizes in the section 'model'"
    value, field = max(sizes)
    source = source_of(config.settings, tuple(field.split(".")))
    return f"the largest size of the section is {field}={value}{f' ({source})' if source else ''}; set a smaller one"


def _integers(section: BaseModel, path: str) -> Iterator[tuple[int, str]]:
    for name in type(section).model_fields:
        value = getattr(section, name)
        value = value.config if isinstance(value, Contained) else value
        if isinstance(value, BaseModel):
            yield from _integers(value, f"{path}.{name}")
        elif isinstance(value, int) and not isinstance(value, bool):
            yield value, f"{path}.{name}"


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
            f"machine has {memory >> 30:,} GiB of memory; {_size_remedy(config)}, or use several machines"
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
