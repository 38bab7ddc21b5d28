"""What the host asks of the package that fills slots which use the tokens of other ranks in forward."""

from typing import Protocol

from mplug.model.model import Model
from mplug.model.slots.offers import Offer
from mplug.registry.provided import needed
from mplug.run.run import Run

TOKENS = ("batch", "sequence")
"""The activation axes of tokens."""
OF_STATISTICS = ("sums_tokens", "joins_sequences", "gathers_positions")
"""The fields of `Slot` that say how a statistic of the model, which is a buffer, uses the tokens of other ranks."""


class TokenOffers(Protocol):
    """The method of the class in the entry-point group 'mplug.token_offers'."""

    def offers(self, run: Run, model: Model) -> list[Offer]:
        """Suppliers of the slots that use the tokens of other ranks (`OF_STATISTICS`, `sums_parts`).

        Collective: all ranks call it, also those whose stage has no such slot.
        """


def token_offers(run: Run, model: Model) -> list[Offer]:
    """The suppliers of the installed class. UsageError if such slots need them and no distribution brings the class."""
    divided = any(axis.divides(named) for axis in run.mesh.views["dense"] for named in TOKENS)
    uses = ("sums_parts", *(OF_STATISTICS if model.plan.buffers else ()))
    if not divided or not any(getattr(slot, use) for slot in model.declared.values() for use in uses):
        return []
    offering: TokenOffers = needed("token_offers", "sums of a model over tokens that ranks divide", "mplug-ops")
    return offering.offers(run, model)
