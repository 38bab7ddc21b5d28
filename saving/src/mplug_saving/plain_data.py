"""Convert state to plain data for JSON and back. Tensors are moved to a flat mapping."""

from typing import Any

from torch import Tensor

TENSOR = "$tensor"
"""The key of the mapping that replaces a tensor."""


def lift(value: Any, tensors: dict[str, Tensor], path: str) -> Any:
    """`value` (mappings, lists, numbers, strings, None, tensors) with each tensor moved to `tensors` under its path."""
    if isinstance(value, Tensor):
        if path in tensors:
            raise TypeError(f"two tensors of the state have the path '{path}'; use names without '/'")
        tensors[path] = value
        return {TENSOR: path}
    if isinstance(value, dict):
        for name in value:
            if not isinstance(name, str):
                raise TypeError(
                    f"state '{path}' has the key {name!r}; use strings, because JSON restores all keys as strings"
                )
        return {str(name): lift(inner, tensors, f"{path}/{name}") for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [lift(inner, tensors, f"{path}/{number}") for number, inner in enumerate(value)]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"state '{path}' contains a {type(value).__name__}; use only tensors and plain data")


def lower(value: Any, tensors: dict[str, Tensor]) -> Any:
    """The inverse of `lift`."""
    if isinstance(value, dict):
        if set(value) == {TENSOR}:
            return tensors[value[TENSOR]]
        return {name: lower(inner, tensors) for name, inner in value.items()}
    return [lower(inner, tensors) for inner in value] if isinstance(value, list) else value
