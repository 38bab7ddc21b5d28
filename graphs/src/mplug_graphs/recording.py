"""A recording of GPU work that can be replayed: a CUDA graph."""

import gc
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch

from mplug import RunError

R = TypeVar("R")


class Recording(Protocol):
    """A recording of the device's work. The CPU's work happens once, when it is recorded."""

    def record(self, work: Callable[[], R]) -> R:
        """Run `work` on the CPU and record what it launches, without computing it; returns the result of `work`."""

    def replay(self) -> None:
        """Compute what was recorded: the same operations on the same memory, without waiting for the device."""


class CudaGraph:
    """A CUDA graph of work on the current stream.

    Recordings with the same `pool` use the same memory, so a result of one is valid only until another is replayed. The
    pool ends with its last recording; None: a pool of its own.
    `remedy` ends the error for work that cannot be replayed.
    """

    def __init__(self, pool: Any, remedy: str = "set trainer.graphs=false, or the dropout to 0") -> None:
        self._graph = torch.cuda.CUDAGraph()
        self._pool, self._remedy = pool, remedy
        self._checked = False

    def record(self, work: Callable[[], R]) -> R:
        """Record; other threads (NCCL's watchdog, a checkpoint that is being written) may use the GPU meanwhile.

        If `work` raises, the recording cannot end either. The error is that of `work`.
        """
        gc.collect()  # the memory of a tensor that a cycle keeps alive could not be reused
        stream, failed = torch.cuda.current_stream(), list[Exception]()
        try:
            with torch.cuda.graph(self._graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
                try:
                    return work()
                except Exception as error:
                    failed.append(error)
                    raise
        except Exception:
            if failed:
                raise failed[0] from None
            raise

    def replay(self) -> None:
        """Launch the graph. The first time, raise RunError if it draws from torch's generator."""
        before = self._drawn()
        self._graph.replay()
        if not self._checked and self._drawn() != before:
            raise RunError(
                f"a kernel of the step draws random numbers from torch's generator, which a CUDA graph does not seed "
                f"for every unit as a run without graphs does; {self._remedy}"
            )
        self._checked = True

    def _drawn(self) -> int:
        """How far the GPU's generator has advanced: the second half of its state, which is on the CPU."""
        state = torch.cuda.default_generators[torch.cuda.current_device()].get_state()
        return int(state[8:16].view(torch.int64))
