"""Buffers of slots: tensors that a supplier keeps for one site, as buffers of the site's module.

The callers of slots pass them to the supplier as the argument `buffers`. So all sites of a role share one supplier, and
one compiled graph.
"""

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor, nn

SEPARATOR = "__"
"""Between the attribute of a slot and the name of its buffer; no attribute of a slot contains it."""


class Buffered(Protocol):
    """What a module declares about one of its slots (`mplug.Slot`), as far as buffers are concerned."""

    @property
    def name(self) -> str:
        """The name of the slot: 'Linear.gemm'."""

    @property
    def buffers(self) -> tuple[str, ...]:
        """What the names of the slot's buffers begin with; empty if the module passes no buffers to the slot."""


def buffer_name(slot: str, name: str) -> str:
    """The name of a slot's buffer in the module: ('Linear.gemm', 'amax') -> 'gemm__amax'."""
    return f"{slot.rpartition('.')[2]}{SEPARATOR}{name}"


def hold(module: nn.Module, slot: Buffered, buffers: Mapping[str, Tensor]) -> None:
    """Register the buffers of a slot with the module that has the slot.

    Raises ValueError if the module does not pass buffers to this slot, if the module has an attribute of a buffer's
    name, or if a module with several products does not know to which of them a buffer belongs.
    """
    if not slot.buffers:
        raise ValueError(f"{type(module).__name__} does not pass buffers to {slot.name}")
    for name, tensor in buffers.items():
        if not name.startswith(slot.buffers):
            prefixes = " or ".join(map(repr, slot.buffers))
            raise ValueError(f"the name '{name}' must begin with {prefixes}, the weight's name")
        attribute = buffer_name(slot.name, name)
        if not attribute.isidentifier():
            raise ValueError(f"'{name}' is not a valid name of a buffer")
        if hasattr(module, attribute):
            raise ValueError(f"{type(module).__name__} already has an attribute '{attribute}'")
        module.register_buffer(attribute, tensor)
    declared: Mapping[str, tuple[str, ...]] = module.slot_buffers  # type: ignore[assignment]
    module.slot_buffers = {**declared, slot.name: tuple(buffers)}  # type: ignore[assignment]


def held(module: nn.Module, slot: str) -> dict[str, Tensor]:
    """The buffers of a slot, by name; empty if its supplier declares none."""
    declared: Mapping[str, tuple[str, ...]] = module.slot_buffers  # type: ignore[assignment]
    return {name: getattr(module, buffer_name(slot, name)) for name in declared.get(slot, ())}
