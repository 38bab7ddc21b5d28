"""The balancer of streams that the host finds (`mplug.model.stream_balancer.StreamBalancer`)."""

from mplug.model.model import Model
from mplug.model.placed import Placed
from mplug.model.slots.offers import Offer
from mplug.run.run import Run
from mplug_streams.balance import Balance
from mplug_streams.conditions import data_axes, refuse_unbalanced, row_returns


class Balancer:
    """The class of the entry-point group 'mplug.balancers'."""

    def refuse(self, run: Run, model: Placed) -> None:
        """Refuse streams whose rows depend on what stays on the rank of their samples."""
        refuse_unbalanced(run, model)

    def offers(self, run: Run, model: Model) -> list[Offer]:
        """A supplier for each stream."""
        return row_returns(run, model)

    def mover(self, run: Run, model: Model) -> Balance | None:
        """A mover along the mesh axes whose ranks read different samples."""
        return Balance(run, model) if data_axes(run) and model.plan.streams else None
