"""Checks that no operation makes the CPU wait for a GPU."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def never_waiting() -> Iterator[None]:
    """In the block, an operation that makes the CPU wait for the GPU raises RuntimeError, if torch detects it.

    torch warns that it does not detect every such operation; it does detect every read of a value.
    """
    import torch

    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype", UserWarning)
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
