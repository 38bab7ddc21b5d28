"""What the host asks of the package by which ranks that read different samples share streams (`parallel.balance`)."""

from collections.abc import Callable
from typing import Protocol

from mplug.contracts.micro_batch import MicroBatch
from mplug.model.model import Model
from mplug.model.placed import Placed
from mplug.model.slots.offers import Offer
from mplug.registry.provided import needed
from mplug.run.run import Run


class RowMover(Protocol):
    """Moves the rows of streams between ranks."""

    def own(self, move: Callable[[MicroBatch], MicroBatch], whole: MicroBatch) -> MicroBatch:
        """This rank's part of a whole micro batch, with the rows that it computes. Collective.

        `move` copies a micro batch to the device.
        """


class StreamBalancer(Protocol):
    """The methods of the class in the entry-point group 'mplug.balancers'. Called if the config asks for balance."""

    def refuse(self, run: Run, model: Placed) -> None:
        """Raise UsageError if the streams of a whole model cannot be balanced."""

    def offers(self, run: Run, model: Model) -> list[Offer]:
        """The suppliers of slots in which rows return (`Slot.returns_rows`). Collective."""

    def mover(self, run: Run, model: Model) -> RowMover | None:
        """What moves the rows; None if no ranks read different samples. Collective."""


def balancer_of(run: Run) -> StreamBalancer | None:
    """The installed balancer; None if the run does not balance streams. UsageError if none is installed."""
    if not run.config.parallel.balance:
        return None
    found: StreamBalancer = needed("balancers", "parallel.balance=true", "mplug-streams")
    return found
