"""Refuse sizes that no machine can hold, before a process starts or memory is allocated."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pydantic import BaseModel

from mplug.config.binding import RunConfig
from mplug.config.family import Contained
from mplug.config.sources import source_of
from mplug.errors import UsageError

MAX_SUBMODULES = 1 << 14
"""Maximum number of submodules of one module, such as the list of blocks: more than any network has."""
MAX_ELEMENTS = 1 << 54
"""Maximum number of parameters of a model: a thousand times the largest."""


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
        raise UsageError(f"the model of {label} is too large: {error}; {size_remedy(config)}") from None
    except (RuntimeError, OverflowError, TypeError, ValueError, MemoryError) as error:
        if not _is_about_size(error):
            raise
        raise UsageError(
            f"the model of {label} is too large: torch cannot count the elements of a tensor; {size_remedy(config)}"
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


def size_remedy(config: RunConfig) -> str:
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
