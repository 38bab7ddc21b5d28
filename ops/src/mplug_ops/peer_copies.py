"""Copies of strided tensors by the copy engines of GPUs.

torch copies strided tensors by a kernel, which takes multiprocessors from the products beside it. The copy engines copy
rows at a distance of each other in one operation (cuMemcpy2DAsync), for which torch has no function.
"""

import ctypes
from functools import cache
from typing import Any

import torch
from torch import Tensor

DEVICE = 2
"""CU_MEMORYTYPE_DEVICE; the memory of other GPUs, once it is mapped, is of this type too."""
REFUSED = 1
"""CUDA_ERROR_INVALID_VALUE: the driver has not started anything."""


class _Side(ctypes.Structure):
    """A tensor of a copy in CUDA_MEMCPY2D: rows of bytes, `pitch` bytes from one another."""

    _fields_ = (
        ("x", ctypes.c_size_t),
        ("y", ctypes.c_size_t),
        ("kind", ctypes.c_uint),
        ("host", ctypes.c_void_p),
        ("address", ctypes.c_uint64),
        ("array", ctypes.c_void_p),
        ("pitch", ctypes.c_size_t),
    )


class _Copy(ctypes.Structure):
    """CUDA_MEMCPY2D."""

    _fields_ = (("source", _Side), ("target", _Side), ("width", ctypes.c_size_t), ("height", ctypes.c_size_t))


@cache
def _driver() -> Any:
    """The driver's function (copy, stream), or None if this machine lacks it."""
    try:
        function = ctypes.CDLL("libcuda.so.1").cuMemcpy2DAsync_v2
    except (OSError, AttributeError):
        return None
    function.argtypes, function.restype = (ctypes.POINTER(_Copy), ctypes.c_void_p), ctypes.c_int
    return function


def copy_samples(target: Tensor, source: Tensor, stream: "torch.cuda.Stream | None") -> None:
    """target [b, n, X] = source [b, n, X]; the rows [n, X] of a sample are contiguous in both.

    `stream` is the current stream on a GPU, and None on a CPU.
    """
    if target.is_contiguous() and source.is_contiguous():
        target.copy_(source)
    elif stream is None or not _copied_at_once(target, source, stream):
        for own, other in zip(target, source, strict=True):
            own.copy_(other)


def _copied_at_once(target: Tensor, source: Tensor, stream: torch.cuda.Stream) -> bool:
    """Copy by one operation, or return False if the driver has none for these tensors."""
    function, size = _driver(), target.itemsize
    if function is None or source.dtype != target.dtype:
        return False
    sides = (
        _Side(kind=DEVICE, address=tensor.data_ptr(), pitch=tensor.stride(0) * size) for tensor in (source, target)
    )
    copy = _Copy(*sides, target[0].numel() * size, len(target))
    status = function(ctypes.byref(copy), stream.cuda_stream)
    if status not in (0, REFUSED):
        raise RuntimeError(f"a copy between GPUs failed with driver error {status}")
    return not status
