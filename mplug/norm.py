"""The norm of the gradients, in as few passes as their memory allows."""

from collections.abc import Iterable

import torch
from torch import Tensor

from mplug.contracts import Piece
from mplug.model import region

PART = 1 << 14
"""Elements that a CPU adds up in one sum: the norm of so many is off by 3e-7 at most in fp32."""
LONG = 1 << 20
"""Elements from which on a stretch is worth a reduction of its own; shorter ones share."""


def owned_gradients(pieces: Iterable[Piece], rank: int) -> list[Tensor]:
    """Views of the gradients so that over all ranks every element appears once: on the first that holds a copy."""
    return [
        region(piece.gradient, box)
        for piece in pieces
        for box in piece.placement.boxes(rank)
        if min(box.copies) == rank
    ]


def merged(views: Iterable[Tensor]) -> list[Tensor]:
    """The same elements in fewer tensors: contiguous views that lie end to end in one storage become a flat one."""
    stretches: list[Tensor] = []
    for view in sorted(views, key=lambda view: (view.untyped_storage().data_ptr(), view.storage_offset())):
        last = stretches[-1] if stretches else None
        if last is not None and _continues(last, view):
            stretches[-1] = last.as_strided((last.numel() + view.numel(),), (1,), last.storage_offset())
        else:
            stretches.append(view)
    return stretches


def _continues(last: Tensor, view: Tensor) -> bool:
    return (
        last.is_contiguous()
        and view.is_contiguous()
        and last.dtype == view.dtype
        and last.untyped_storage().data_ptr() == view.untyped_storage().data_ptr()
        and last.storage_offset() + last.numel() == view.storage_offset()
    )


def parts(views: Iterable[Tensor]) -> list[Tensor]:
    """The same elements in parts of at most `PART` elements; a view that is not contiguous is cut by its rows."""
    found: list[Tensor] = []
    for view in views:
        if view.is_contiguous():
            found += view.view(-1).split(PART)
        elif view.numel():
            found += view.split(max(1, PART * len(view) // view.numel()))
    return found


class GlobalNorm:
    """The 2-norm of all of a rank's gradients together, in `dtype`; their memory stays where it is.

    A GPU reduces a stretch as a tree, so neighbours are measured as one stretch. A CPU adds up a stretch from one end
    to the other, which in fp32 is off by 1e-3 over 10^7 elements: there a gradient is measured in parts of at most
    `PART` elements.
    """

    def __init__(self, owned: list[Tensor], device: str, dtype: torch.dtype = torch.float32) -> None:
        stretches = merged(owned) if device == "cuda" else []
        self.device, self.dtype = device, dtype
        self.long = [stretch for stretch in stretches if stretch.numel() >= LONG]
        self.short = [stretch for stretch in stretches if stretch.numel() < LONG] if stretches else parts(owned)

    def __call__(self) -> Tensor:
        """The norm [] of what the gradients are now; 0 where the rank has none."""
        norms = [torch.linalg.vector_norm(stretch, dtype=self.dtype) for stretch in self.long]
        if self.short:
            norms += torch._foreach_norm(self.short, dtype=self.dtype)
        if not norms:
            return torch.zeros((), dtype=self.dtype, device=self.device)
        norm: Tensor = torch.linalg.vector_norm(torch.stack(norms))
        return norm
