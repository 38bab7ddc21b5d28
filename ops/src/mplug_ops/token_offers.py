"""The offers that the host asks for (`mplug.model.slots.token_offers.TokenOffers`)."""

from mplug.model.model import Model
from mplug.model.slots.offers import Offer
from mplug.run.run import Run
from mplug_ops.token_sums import sums_of_parts, token_sums
from mplug_ops.whole_sequences import whole_keys, whole_sequences


class TokenOffers:
    """The class of the entry-point group 'mplug.token_offers'."""

    def offers(self, run: Run, model: Model) -> list[Offer]:
        """Sums over tokens and over parts of sequences, whole sequences and whole keys."""
        sums = [*token_sums(run, model), *sums_of_parts(run, model)]
        return [*sums, *whole_sequences(run, model), *whole_keys(run, model)]
