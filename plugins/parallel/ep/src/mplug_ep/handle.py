"""Handles of DeepEP as tensors: a compiled graph keeps them, and whatever recomputes a unit makes them again.

A handle is an object whose attributes are tensors, numbers, lists of numbers, or None. `packed` has the bytes of its
tensors, on the device. `header`, on the CPU, has for every attribute in turn its kind, followed by its number, by the
length and the numbers of a list, or by dtype, offset, number of dimensions and shape of a tensor.
"""

from typing import Any

import torch
from torch import Tensor

NONE, BOOL, INT, LIST, TENSOR = range(5)
DTYPES = (torch.int32, torch.int64, torch.uint8, torch.bool, torch.float32, torch.int16, torch.int8, torch.bfloat16)
ALIGNED = 16
"""Alignment in bytes of the tensors in `packed`."""


def pack(handle: Any, device: torch.device) -> tuple[Tensor, Tensor]:
    """A handle -> (packed [bytes] uint8, header [n] int64). Raises TypeError for an attribute of another kind."""
    header: list[int] = []
    parts: list[Tensor] = []
    offset = 0
    for name, value in vars(handle).items():
        if value is None:
            header.append(NONE)
        elif isinstance(value, bool | int):
            header += [BOOL if isinstance(value, bool) else INT, int(value)]
        elif isinstance(value, list | tuple) and all(isinstance(one, int) for one in value):
            header += [LIST, len(value), *value]
        elif isinstance(value, Tensor) and value.dtype in DTYPES:
            header += [TENSOR, DTYPES.index(value.dtype), offset, value.dim(), *value.shape]
            own = value.detach().contiguous().view(-1).view(torch.uint8)
            parts += [own, own.new_empty(-len(own) % ALIGNED)]
            offset += len(own) + len(parts[-1])
        else:
            raise TypeError(
                f"DeepEP's {type(handle).__name__}.{name} is {type(value).__name__}, which "
                f"parallel.ep.dispatch=deepep cannot keep for backward; use another version of DeepEP, or "
                f"parallel.ep.dispatch=once_per_rank"
            )
    packed = torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8, device=device)
    return packed, torch.tensor(header, dtype=torch.int64, device="cpu")


def unpack(packed: Tensor, header: Tensor, kind: type[Any], names: tuple[str, ...]) -> Any:
    """The handle of class `kind` with attributes `names`; its tensors are views of `packed`."""
    numbers = iter(header.tolist())
    handle = kind.__new__(kind)
    for name in names:
        setattr(handle, name, _read(packed, numbers))
    return handle


def _read(packed: Tensor, numbers: Any) -> Any:
    sort = next(numbers)
    if sort == NONE:
        return None
    if sort in (BOOL, INT):
        number = next(numbers)
        return bool(number) if sort == BOOL else number
    if sort == LIST:
        return [next(numbers) for _ in range(next(numbers))]
    dtype, offset = DTYPES[next(numbers)], next(numbers)
    shape = [next(numbers) for _ in range(next(numbers))]
    size = dtype.itemsize
    for length in shape:
        size *= length
    return packed[offset : offset + size].view(dtype).view(shape)
