"""Converts Energon's states to plain data and tensors, which a checkpoint can hold, and back.

Energon's states consist of its own classes, tuples and bytes; its command-line tools pickle them. Reading a checkpoint
of mplug must not run code from it. So each supported kind of value is stored with its name; other kinds are refused.
"""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch
from megatron.energon.flavors.webdataset.sample_loader import SliceState
from megatron.energon.rng import SystemRngState
from megatron.energon.savable_loader import SavableDataLoaderState, SavableDatasetCheckpoint, SavableDatasetState
from megatron.energon.state import FlexState

KIND = "$"
"""The key for the kind of a value; a mapping of Energon never has this key."""
CLASSES: dict[str, type[Any]] = {
    kind.__name__: kind
    for kind in (SavableDataLoaderState, SavableDatasetCheckpoint, SavableDatasetState, SystemRngState, SliceState)
}


def to_plain(value: Any) -> Any:
    """A state as mappings, lists, numbers, strings, None and tensors. Raises TypeError for other kinds."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, bytes):
        return {KIND: "bytes", "of": torch.frombuffer(bytearray(value or b"\0"), dtype=torch.uint8)[: len(value)]}
    if isinstance(value, torch.Tensor):
        return {KIND: "tensor", "of": value.detach().clone()}
    if isinstance(value, np.ndarray):
        return {KIND: "array", "of": torch.from_numpy(value.astype(np.int64)), "dtype": value.dtype.name}
    if isinstance(value, tuple):
        return {KIND: "tuple", "of": _plain_list(value)}
    if isinstance(value, list):
        return {KIND: "list", "of": _plain_list(value)}
    if isinstance(value, Mapping):
        kind = "state" if isinstance(value, FlexState) else "mapping"
        return {KIND: kind, "of": [[to_plain(name), to_plain(inner)] for name, inner in value.items()]}
    name = type(value).__name__
    if is_dataclass(value) and CLASSES.get(name) is type(value):
        return {KIND: name, "of": {field.name: to_plain(getattr(value, field.name)) for field in fields(value)}}
    raise TypeError(f"a state of Energon contains a {name}, which a checkpoint cannot store")


def from_plain(value: Any) -> Any:
    """The inverse of `to_plain`; raises KeyError, TypeError or AttributeError for other data."""
    if not isinstance(value, dict):
        return value
    kind, of = value[KIND], value["of"]
    if kind in CLASSES:
        return CLASSES[kind](**{name: from_plain(inner) for name, inner in of.items()})
    if kind in ("state", "mapping"):
        pairs = {from_plain(name): from_plain(inner) for name, inner in of}
        return FlexState(pairs) if kind == "state" else pairs
    if kind in ("tuple", "list"):
        numbers = of.tolist() if isinstance(of, torch.Tensor) else [from_plain(inner) for inner in of]
        return tuple(numbers) if kind == "tuple" else numbers
    if kind == "bytes":
        return bytes(of.tolist())
    if kind == "array":
        return of.numpy().astype(value["dtype"])
    if kind == "tensor":
        return of.clone()
    raise TypeError(f"a state of Energon contains the unknown kind '{kind}'")


def _plain_list(values: Any) -> Any:
    """A long list of integers as one tensor (Python's random state has 625), any other list item by item."""
    if len(values) > 16 and all(type(value) is int and abs(value) < 1 << 62 for value in values):
        return torch.tensor(values, dtype=torch.int64)
    return [to_plain(value) for value in values]
