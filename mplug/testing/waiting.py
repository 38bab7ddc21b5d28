"""That nothing makes the host wait for a GPU."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def never_waiting() -> Iterator[None]:
    """In the block, whatever makes the host wait for the GPU raises RuntimeError, by torch's own account.

    Torch warns that it does not see every such call; it does see each value that is read.
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
