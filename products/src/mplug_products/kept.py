"""What the host asks about products (`mplug.model.products.Products`)."""

from collections.abc import Iterable

from torch import Tensor

from mplug.model.built import Built
from mplug.model.model import Model
from mplug.model.products import Update
from mplug.model.slots.offers import Filled, Site
from mplug.run.run import Run
from mplug_products.casts import copies_of, keep_casts
from mplug_products.gathering import refuse_idle_copies
from mplug_products.placing import add_slot_buffers
from mplug_products.recipe import choose_base_modules, only_in_other_stages, with_recipe
from mplug_products.states import slot_updates


class Products:
    """The class of the entry-point group 'mplug.products'."""

    def choose_base_modules(self, run: Run, model: Built) -> tuple[str, ...]:
        """The patterns of the modules whose products ignore the recipe of the precision."""
        return choose_base_modules(run, model)

    def with_recipe(self, sites: Iterable[Site], model: Built) -> Iterable[Site]:
        """The sites, of which products outside of the base modules need the recipe."""
        return with_recipe(sites, model)

    def only_in_other_stages(self, model: Model, own: Iterable[Site]) -> set[str]:
        """The kinds of products that only other stages compute by the recipe."""
        return only_in_other_stages(model, own)

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
