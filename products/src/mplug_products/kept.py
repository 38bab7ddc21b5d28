"""What the host asks about products (`mplug.model.products.Products`)."""

from collections.abc import Iterable

from torch import Tensor

from mplug.model.model import Model
from mplug.model.products import Update
from mplug.model.slots.offers import Filled
from mplug.run.run import Run
from mplug_products.casts import copies_of, keep_casts
from mplug_products.gathering import refuse_idle_copies
from mplug_products.placing import add_slot_buffers
from mplug_products.states import slot_updates


class Products:
    """The class of the entry-point group 'mplug.products'."""

    def add_buffers(self, model: Model, run: Run, contents: Iterable[Filled]) -> None:
        """Register, describe and place the buffers that selected offers declare."""
        add_slot_buffers(model, run, contents)

    def updates(self, model: Model) -> list[Update]:
        """The functions that update the states of suppliers after a step."""
        return slot_updates(model.slot_buffers)

    def keep_casts(self, model: Model) -> None:
        """Let every unit make the copies that its products read once for each version of the weights."""
        keep_casts(model)

    def copies(self, model: Model) -> list[Tensor]:
        """New copies of all weights of this rank, as units keep them."""
        return copies_of(model)

    def refuse_idle_copies(self, run: Run, model: Model) -> None:
        """Raise UsageError if a strategy gathers copies and no product has any."""
        refuse_idle_copies(run, model)
