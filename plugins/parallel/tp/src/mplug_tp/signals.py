"""Signals between the streams of several GPUs, through words in memory that the GPUs can access directly.

They are CUDA's stream memory operations (cuStreamWaitValue32, cuStreamWriteValue32): no kernel waits, so a signal never
needs a free multiprocessor, and the CPU waits for nothing. A word counts upwards; a wait is for at least a value. torch
has no function for the wait, so this file calls the driver.
"""

import ctypes
from functools import cache

import torch

AT_LEAST = 0
"""CU_STREAM_WAIT_VALUE_GEQ: cyclic, so counters may overflow."""


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


@cache
def available() -> bool:
    """Whether this machine's driver has stream memory operations."""
    try:
        return all(hasattr(_driver(), name) for name in ("cuStreamWaitValue32_v2", "cuStreamWriteValue32_v2"))
    except OSError:
        return False


def raise_word(stream: torch.cuda.Stream, address: int, value: int) -> None:
    """Write a value to a word when the preceding work of the stream is done and visible to all GPUs."""
    _call("cuStreamWriteValue32_v2", stream, address, value)


def await_word(stream: torch.cuda.Stream, address: int, value: int) -> None:
    """The stream waits until a word of its own GPU is at least a value."""
    _call("cuStreamWaitValue32_v2", stream, address, value)


def _call(name: str, stream: torch.cuda.Stream, address: int, value: int) -> None:
    function, handle = getattr(_driver(), name), ctypes.c_void_p(stream.cuda_stream)
    status = function(handle, ctypes.c_uint64(address), ctypes.c_uint32(value), ctypes.c_uint(AT_LEAST))
    if status:
        raise RuntimeError(f"{name} failed with CUDA driver error {status}")
