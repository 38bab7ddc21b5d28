"""What ranks compute that divide samples by their documents (`mplug.DocumentMap`), and how unequal their work is."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mplug.contracts.micro_batch import DOCUMENTS, MicroBatch
from mplug.layout.mesh import DocumentMap, Ranges

if TYPE_CHECKING:
    from mplug.layout.mesh import Axis, Mesh


class DocumentShares:
    """The work of the ranks along each axis with a `DocumentMap`, summed over the micro batches of a step.

    `divided` is what they compute. `static` is what they would compute if the map did not read the documents.
    """

    def __init__(self, mesh: "Mesh") -> None:
        self._maps = document_maps(mesh)
        self._divided, self._static = self._zeros(), self._zeros()

    def add(self, batch: MicroBatch) -> None:
        """Add a whole micro batch."""
        if DOCUMENTS not in batch:
            return
        for axis, cut in self._maps:
            divided, static = self._divided[axis.name], self._static[axis.name]
            for lengths, ranges in zip(batch[DOCUMENTS].tolist(), divisions(batch, cut, axis.size), strict=True):
                for rank, held in enumerate(ranges):
                    divided[rank] += cut.work(lengths, held)
                    static[rank] += cut.work(lengths, cut.static(sum(lengths), axis.size, rank))

    def take(self) -> dict[str, float]:
        """For each axis, the work of the rank with the most since the last call, over the mean of ranks."""
        found = {}
        for axis, _ in self._maps:
            for name, work in (("imbalance", self._divided), ("imbalance_undivided", self._static)):
                if sum(work[axis.name]):
                    found[f"{axis.name}_{name}"] = max(work[axis.name]) * axis.size / sum(work[axis.name])
        self._divided, self._static = self._zeros(), self._zeros()
        return found

    def _zeros(self) -> dict[str, list[int]]:
        return {axis.name: [0] * axis.size for axis, _ in self._maps}


def document_maps(mesh: "Mesh") -> "list[tuple[Axis, DocumentMap]]":
    """The axes with more than one rank that divide samples by documents, with their maps."""
    found = []
    for axis in mesh.views["dense"]:
        cut = axis.entries.get("sequence")
        if isinstance(cut, DocumentMap) and axis.size > 1:
            found.append((axis, cut))
    return found


def own_documents(
    x: Tensor, dims: tuple[int, int], batch: MicroBatch, cut: DocumentMap, size: int, index: int
) -> Tensor:
    """The positions of x that the rank `index` of `size` has; `dims` are those of samples and positions.

    x may have one row for all samples.
    """
    places = torch.stack([_places(of[index]) for of in divisions(batch, cut, size)])
    return _chosen(x, *dims, places)


def divisions(batch: MicroBatch, cut: DocumentMap, size: int) -> list[tuple[Ranges, ...]]:
    """The ranges of each rank, for each sample of a packed micro batch."""
    return [cut.divide(tuple(lengths), size) for lengths in batch[DOCUMENTS].tolist()]


def _places(ranges: Ranges) -> Tensor:
    return torch.cat([torch.arange(part.start, part.stop) for part in ranges])


def _chosen(x: Tensor, of_batch: int, dim: int, places: Tensor) -> Tensor:
    """The positions `places` [B, n] of each sample, along `dim` of x; x may have one row for all samples."""
    x = x.movedim((of_batch, dim), (0, 1)).expand(len(places), *(-1 for _ in range(x.dim() - 1)))
    rows = torch.arange(len(places))[:, None]
    return x[rows.to(x.device), places.to(x.device)].movedim((0, 1), (of_batch, dim))
