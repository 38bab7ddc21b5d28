"""Counts the memory of tensors on a CPU, which has no counter of its own, as `torch.cuda.memory_allocated` does."""

import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Within this context, counts the bytes of the storages that operations allocate, until each is freed.

    It counts what operations return, also inside a backward pass on a CPU, but not the working memory of a kernel.
    Compiled code is one operation, so use it with eager units.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.held = self.peak = 0
        self._alive: set[int] = set()

    def reset_peak(self) -> None:
        """Set the peak to the bytes that are held now."""
        self.peak = self.held

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, and count the storages that it has allocated."""
        given = {storage._cdata for storage in _storages((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        for storage in _storages(result):
            number = storage._cdata
            if number not in given and number not in self._alive and storage.nbytes():
                self._alive.add(number)
                self.held += storage.nbytes()
                self.peak = max(self.peak, self.held)
                weakref.finalize(storage, self._freed, number, storage.nbytes())
        return result

    def _freed(self, number: int, nbytes: int) -> None:
        self._alive.discard(number)
        self.held -= nbytes


def _storages(values: Any) -> Iterator[torch.UntypedStorage]:
    leaves: Iterable[Any] = tree_leaves(values)
    for leaf in leaves:
        if isinstance(leaf, Tensor) and leaf.layout is torch.strided:
            yield leaf.untyped_storage()
