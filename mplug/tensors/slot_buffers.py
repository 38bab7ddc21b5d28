"""Buffers of slots: tensors that a supplier keeps for one site, as buffers of the site's module.

The callers of slots pass them to the supplier as the argument `buffers`. So all sites of a role share one supplier, and
one compiled graph.
"""

from collections.abc import Mapping

from torch import Tensor, nn

SEPARATOR = "__"
"""Between the attribute of a slot and the name of its buffer; no attribute of a slot contains it."""


def buffer_name(slot: str, name: str) -> str:
    """The name of a slot's buffer in the module: ('Linear.gemm', 'amax') -> 'gemm__amax'."""
    return f"{slot.rpartition('.')[2]}{SEPARATOR}{name}"


def hold(module: nn.Module, slot: str, buffers: Mapping[str, Tensor]) -> None:
    """Register the buffers of a slot with the module that has the slot.

    Raises ValueError if the module's class does not pass buffers to this slot (`BUFFERED_SLOTS`), if the module has an
    attribute of a buffer's name, or if a module with several products does not know to which of them a buffer belongs
    (`BUFFER_PREFIXES`).
    """
    if slot not in getattr(type(module), "BUFFERED_SLOTS", ()):
        raise ValueError(f"{type(module).__name__} does not pass buffers to {slot}")
    prefixes: tuple[str, ...] = getattr(type(module), "BUFFER_PREFIXES", ("",))
    for name, tensor in buffers.items():
        if not name.startswith(prefixes):
            raise ValueError(f"the name '{name}' must begin with {' or '.join(map(repr, prefixes))}, the weight's name")
        attribute = buffer_name(slot, name)
        if not attribute.isidentifier():
            raise ValueError(f"'{name}' is not a valid name of a buffer")
        if hasattr(module, attribute):
            raise ValueError(f"{type(module).__name__} already has an attribute '{attribute}'")
        module.register_buffer(attribute, tensor)
    declared: Mapping[str, tuple[str, ...]] = module.slot_buffers  # type: ignore[assignment]
    module.slot_buffers = {**declared, slot: tuple(buffers)}  # type: ignore[assignment]


def held(module: nn.Module, slot: str) -> dict[str, Tensor]:
    """The buffers of a slot, by name; empty if its supplier declares none."""
    declared: Mapping[str, tuple[str, ...]] = module.slot_buffers  # type: ignore[assignment]
    return {name: getattr(module, buffer_name(slot, name)) for name in declared.get(slot, ())}
