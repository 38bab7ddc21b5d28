"""What the host asks of the package that divides the work of a step among ranks: rows, documents, samples."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Protocol

from mplug.contracts.loader import Loader
from mplug.contracts.micro_batch import MicroBatch
from mplug.layout.mesh import DocumentMap
from mplug.registry.provided import needed, provided

if TYPE_CHECKING:
    from torch import Tensor

    from mplug.layout.mesh import Mesh
    from mplug.layout.plan import Plan
    from mplug.run.run import Run


class Measured(Protocol):
    """The work of ranks that divide samples by their documents (`mplug.DocumentMap`), summed over a step."""

    def add(self, batch: MicroBatch) -> None:
        """Add a whole micro batch."""

    def take(self) -> dict[str, float]:
        """Figures of the work since the last call, by name."""


class Division(Protocol):
    """The methods of the class in the entry-point group 'mplug.divisions'.

    The host calls the methods about rows if the plan has streams (`mplug.Stream`); `batch` is a whole micro batch.
    Without an installed class, the work of ranks is not measured.
    """

    def shared_loader(self, run: "Run", build: Callable[[], Loader]) -> Loader:
        """A loader whose samples, state and failures are those of the loader that `build` returns, on every rank.

        For `parallel.read_once`: only the first of the ranks that compute with the same samples calls `build`.
        Collective.
        """

    def malformed(self, batch: MicroBatch, plan: "Plan") -> str:
        """A sentence about entries of streams that contradict one another; '' if there are none."""

    def count_rows(self, batch: MicroBatch, plan: "Plan") -> dict[str, tuple[int, int]]:
        """(rows, sum of the squared lengths of segments), by the entry with the lengths."""

    def own_rows(self, batch: MicroBatch, plan: "Plan", mesh: "Mesh", rank: int) -> MicroBatch:
        """The micro batch with the rows that `rank` computes, and with the numbers that groups then have."""

    def own_documents(
        self, x: "Tensor", dims: tuple[int, int], batch: MicroBatch, cut: DocumentMap, size: int, index: int
    ) -> "Tensor":
        """The positions of x that the rank `index` of `size` has; `dims` are those of samples and positions."""

    def of_documents(self, mesh: "Mesh") -> Measured | None:
        """What measures the work of ranks that divide samples by documents; None if no ranks do."""

    def dealt(self, work: Sequence[int], shards: int, micro_batch_size: int) -> list[list[int]]:
        """The numbers of a step's samples that each shard reads, in order; `work` is that of each sample."""

    def imbalance(self, work: Sequence[int], shares: Sequence[Sequence[int]]) -> float:
        """The work of the shard with the most, over the mean of all shards; 1 if there is no work."""


@cache
def division() -> Division:
    """The installed class, for a model with streams, or for a run that balances work."""
    found: Division = needed(
        "divisions",
        "streams of a model, parallel.balance=true, parallel.read_once=true or division by documents",
        "mplug-streams",
    )
    return found


def division_if_installed() -> Division | None:
    """The installed class, or None."""
    found: Division | None = provided("divisions")
    return found
