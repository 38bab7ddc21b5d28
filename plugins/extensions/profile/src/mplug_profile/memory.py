"""The recording of allocations of GPU memory by torch's allocator."""

from collections.abc import Iterator
from pathlib import Path

import torch


class MemoryHistory:
    """Records the last `entries` allocations of this process with their Python stacks, until `end`."""

    def __init__(self, entries: int) -> None:
        torch.cuda.memory._record_memory_history(stacks="python", max_entries=entries)

    @staticmethod
    def is_exhausted(error: BaseException) -> bool:
        """Whether an exception, or one that caused it, says that the memory of the GPU is exhausted."""
        return any(isinstance(one, torch.OutOfMemoryError) for one in _causes(error))

    def write(self, folder: Path, rank: int) -> Path:
        """Write the allocated blocks and the recorded allocations; returns the file."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"memory_rank{rank}.pickle"
        torch.cuda.memory._dump_snapshot(str(path))
        return path

    def end(self) -> None:
        """End the recording."""
        torch.cuda.memory._record_memory_history(enabled=None)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
