"""The global norm of the gradients, with few kernel launches."""

from collections.abc import Iterable

import torch
from torch import Tensor

from mplug.contracts.optimizer import Piece
from mplug.gradients.region import region

PART = 1 << 14
"""Maximum number of elements that a CPU adds in one sum: in fp32 the norm of this many has an error below 3e-7."""
LONGEST = 1 << 30
"""Maximum number of bytes that one reduction reads: beyond 2^31, torch divides a reduction into slower ones."""
LONG = 1 << 20
"""Number of elements from which a stretch gets a reduction of its own; shorter ones share one launch."""


def owned_gradients(pieces: Iterable[Piece], rank: int) -> list[Tensor]:
    """Views of the gradients that this rank counts: every element counts once, on the lowest rank with a copy."""
    return [
        region(piece.gradient, box)
        for piece in pieces
        for box in piece.placement.boxes(rank)
        if box.copies.first == rank
    ]


def merged(views: Iterable[Tensor]) -> list[Tensor]:
    """The same elements in fewer tensors: contiguous views that are adjacent in one storage become one flat view.

    A segment of stacked matrices is not contiguous; that of each matrix is, and lies beside the next segment.
    """
    stretches: list[Tensor] = []
    views = (part for view in views for part in _contiguous(view))
    for view in sorted(views, key=lambda view: (view.untyped_storage().data_ptr(), view.storage_offset())):
        last = stretches[-1] if stretches else None
        if last is not None and _continues(last, view):
            stretches[-1] = last.as_strided((last.numel() + view.numel(),), (1,), last.storage_offset())
        else:
            stretches.append(view)
    return stretches


def _contiguous(view: Tensor) -> Iterable[Tensor]:
    """The view in slices along its first dimension, if these are contiguous and the view is not."""
    if view.is_contiguous() or view.dim() < 3:
        return [view]
    slices = view.unbind(0)
    return slices if slices[0].is_contiguous() else [view]


def _continues(last: Tensor, view: Tensor) -> bool:
    return (
        last.is_contiguous()
        and view.is_contiguous()
        and last.dtype == view.dtype
        and last.untyped_storage().data_ptr() == view.untyped_storage().data_ptr()
        and last.storage_offset() + last.numel() == view.storage_offset()
    )


def cut(stretch: Tensor) -> list[Tensor]:
    """The same elements in parts of at most `LONGEST` bytes; a view that is not contiguous stays whole."""
    if not stretch.is_contiguous():
        return [stretch]
    return list(stretch.view(-1).split(LONGEST // stretch.itemsize))


def parts(views: Iterable[Tensor]) -> list[Tensor]:
    """The same elements in parts of about `PART` elements at most; a view that is not contiguous is cut by rows."""
    found: list[Tensor] = []
    for view in views:
        if view.is_contiguous():
            found += view.view(-1).split(PART)
        elif view.numel():
            found += view.split(max(1, PART * len(view) // view.numel()))
    return found


class GlobalNorm:
    """The 2-norm of all of a rank's gradients, computed in `dtype` without copying them.

    A GPU reduces a tensor as a tree, so neighbours are merged into one stretch. A CPU adds elements sequentially, which
    in fp32 has an error of 1e-3 over 10^7 elements; so on a CPU the gradients are cut into parts of at most `PART`
    elements.
    """

    def __init__(self, owned: list[Tensor], device: str, dtype: torch.dtype = torch.float32) -> None:
        stretches = merged(owned) if device == "cuda" else []
        self.device, self.dtype = device, dtype
        self.long = [part for stretch in stretches if stretch.numel() >= LONG for part in cut(stretch)]
        self.short = [stretch for stretch in stretches if stretch.numel() < LONG] if stretches else parts(owned)

    def __call__(self) -> Tensor:
        """The norm [] of the current gradients; 0 if the rank has none."""
        norms = [torch.linalg.vector_norm(stretch, dtype=self.dtype) for stretch in self.long]
        if self.short:
            norms += torch._foreach_norm(self.short, dtype=self.dtype)
        if not norms:
            return torch.zeros((), dtype=self.dtype, device=self.device)
        norm: Tensor = torch.linalg.vector_norm(torch.stack(norms))
        return norm
