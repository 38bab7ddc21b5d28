"""Samples that ranks divide by their documents (`mplug.DocumentMap`), brought into sequence order: torch operators.

B batch, S positions of a rank, R ranks, T = R S positions of a sample, M documents of a sample.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from mplug.tensors.operator import fake, operator

Division = Callable[[tuple[int, ...]], Sequence[Sequence[range]]]
"""The lengths of the documents of a sample -> the positions of each rank, as intervals in its order."""
_DIVISIONS: list[Division] = []


def number_of(division: Division) -> int:
    """The number of a division in this process: an operator receives it instead of the function.

    The process keeps the function, so it must not hold a run: the run's process groups would stay, and with them the
    connections to ranks that have left a run after a death.
    """
    _DIVISIONS.append(division)
    return len(_DIVISIONS) - 1


def in_rank_order(x: Tensor, lengths: Tensor, division: int) -> Tensor:
    """x [B, T, ...] in sequence order -> the same positions in rank order: the inverse of `in_sequence_order`."""
    order = _order(lengths, x, division).argsort(dim=1)
    return x[torch.arange(len(order), device=order.device)[:, None], order]


def in_sequence_order(gathered: Sequence[Tensor], lengths: Tensor, division: int) -> list[Tensor]:
    """Tensors [B, T, ...], the positions of all ranks in rank order -> the same positions in sequence order.

    `lengths` [B, M] are those of documents. The CPU reads them, and waits for the device if they are on it.
    """
    order = _order(lengths, gathered[0], division)
    rows = torch.arange(len(order), device=order.device)[:, None]
    return [x[rows, order] for x in gathered]


@operator("mplug_ops::order_of_documents")
def _order(lengths: Tensor, like: Tensor, division: int) -> Tensor:
    """The row in rank order of each position [B, T], on the device of `like` [B, T, ...]."""
    order = torch.stack([_rows(tuple(documents), division) for documents in lengths.tolist()])
    return order.pin_memory().to(like.device, non_blocking=True) if like.is_cuda else order


@fake("mplug_ops::order_of_documents")
def _(lengths: Tensor, like: Tensor, division: int) -> Tensor:
    return like.new_empty(like.shape[:2], dtype=torch.int64)


@lru_cache(maxsize=64)
def _rows(documents: tuple[int, ...], division: int) -> Tensor:
    """The row in rank order of each position [T] of a sample; all layers of a micro batch ask for the same."""
    parts = _DIVISIONS[division](documents)
    return torch.cat([torch.arange(part.start, part.stop) for of_rank in parts for part in of_rank]).argsort()
