"""What the host asks about the division of a step's work among ranks (`mplug.training.division.Division`)."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from mplug.contracts.loader import Loader
from mplug.contracts.micro_batch import MicroBatch
from mplug.layout.mesh import DocumentMap
from mplug_streams.document_shares import DocumentShares, document_maps, own_documents
from mplug_streams.rows import count_rows, malformed_streams, own_rows
from mplug_streams.sharing import Sharing
from mplug_streams.work_shares import dealt, imbalance

if TYPE_CHECKING:
    from torch import Tensor

    from mplug.layout.mesh import Mesh
    from mplug.layout.plan import Plan
    from mplug.run.run import Run


class Division:
    """The class of the entry-point group 'mplug.divisions'."""

    def shared_loader(self, run: "Run", build: Callable[[], Loader]) -> Loader:
        """A loader that reads on one rank for several."""
        return Sharing().loader(run, build)

    def malformed(self, batch: MicroBatch, plan: "Plan") -> str:
        """A sentence about entries of streams that contradict one another; '' if there are none."""
        return malformed_streams(batch, plan)

    def count_rows(self, batch: MicroBatch, plan: "Plan") -> dict[str, tuple[int, int]]:
        """(rows, sum of the squared lengths of segments), by the entry with the lengths."""
        return count_rows(batch, plan)

    def own_rows(self, batch: MicroBatch, plan: "Plan", mesh: "Mesh", rank: int) -> MicroBatch:
        """A whole micro batch with the rows of streams that a rank computes."""
        return own_rows(batch, plan, mesh, rank)

    def own_documents(
        self, x: "Tensor", dims: tuple[int, int], batch: MicroBatch, cut: DocumentMap, size: int, index: int
    ) -> "Tensor":
        """The positions of x that the rank `index` of `size` has; `dims` are those of samples and positions."""
        return own_documents(x, dims, batch, cut, size, index)

    def of_documents(self, mesh: "Mesh") -> DocumentShares | None:
        """What measures the work of ranks that divide samples by their documents; None if no ranks do."""
        return DocumentShares(mesh) if document_maps(mesh) else None

    def dealt(self, work: Sequence[int], shards: int, micro_batch_size: int) -> list[list[int]]:
        """The numbers of the samples of each shard, so that all have equal work."""
        return dealt(work, shards, micro_batch_size)

    def imbalance(self, work: Sequence[int], shares: Sequence[Sequence[int]]) -> float:
        """The work of the shard with the most, over the mean of all shards."""
        return imbalance(work, shares)
