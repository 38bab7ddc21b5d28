"""Signals between the streams of several GPUs, through words in memory that the GPUs can access directly.

They are CUDA's stream memory operations (cuStreamWaitValue32, cuStreamWriteValue32): no kernel waits, so a signal never
needs a free multiprocessor, and the CPU waits for nothing. A word counts upwards; a wait is for at least a value. torch
has no function for the wait, so this file calls the driver.
"""

import ctypes
from functools import cache
from typing import Any

import torch

AT_LEAST = 0
"""CU_STREAM_WAIT_VALUE_GEQ: cyclic, so counters may overflow."""


@cache
def _functions() -> tuple[Any, Any] | None:
    """The driver's functions (wait, write), or None if this machine lacks them."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        found = driver.cuStreamWaitValue32_v2, driver.cuStreamWriteValue32_v2
    except (OSError, AttributeError):
        return None
    for function in found:  # (stream, address, value, flags)
        function.argtypes = (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint)
        function.restype = ctypes.c_int
    return found


def available() -> bool:
    """Whether this machine's driver has stream memory operations."""
    return _functions() is not None


def raise_word(stream: torch.cuda.Stream, address: int, value: int) -> None:
    """Write a value to a word when the preceding work of the stream is done and visible to all GPUs."""
    _call(1, stream, address, value)


def await_word(stream: torch.cuda.Stream, address: int, value: int) -> None:
    """The stream waits until a word of its own GPU is at least a value."""
    _call(0, stream, address, value)


def _call(number: int, stream: torch.cuda.Stream, address: int, value: int) -> None:
    functions = _functions()
    assert functions is not None
    status = functions[number](stream.cuda_stream, address, value, AT_LEAST)
    if status:
        raise RuntimeError(f"a CUDA stream memory operation failed with driver error {status}")
