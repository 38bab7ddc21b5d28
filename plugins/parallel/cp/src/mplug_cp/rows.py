"""Positions as intervals, and the rows of tensors that hold them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from mplug import Ranges


def within(wanted: Sequence[range], held: Ranges) -> list[range]:
    """The positions that are in both, in order; both are in order."""
    found, first = [], 0
    for part in wanted:
        while first < len(held) and held[first].stop <= part.start:
            first += 1
        for other in held[first:]:
            if other.start >= part.stop:
                break
            found.append(range(max(part.start, other.start), min(part.stop, other.stop)))
    return found


def rows_in(wanted: Sequence[range], held: Sequence[range], device: torch.device) -> Tensor:
    """The row of each wanted position in a tensor whose rows are the positions of `held`, in this order."""
    positions, rows = (torch.cat([torch.empty(0, dtype=torch.int64), *map(_counted, of)]) for of in (wanted, held))
    order = rows.argsort()
    return moved(order[torch.searchsorted(rows[order], positions)], device)


def moved(x: Tensor, device: torch.device) -> Tensor:
    """x on a device, copied asynchronously."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)


def _counted(part: range) -> Tensor:
    return torch.arange(part.start, part.stop)
