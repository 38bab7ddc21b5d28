"""What the host asks of the package that keeps what products need beside their weights: buffers, and copies."""

from collections.abc import Callable, Iterable
from typing import Protocol

from torch import Tensor

from mplug.model.built import Built
from mplug.model.model import Model
from mplug.model.slots.offers import Filled, Site
from mplug.registry.provided import needed, provided
from mplug.run.run import Run

Update = Callable[[Tensor], None]
"""`skip` [] -> None: updates states after a step; with `skip` = 1, no state may change."""


class Products(Protocol):
    """The methods of the class in the entry-point group 'mplug.products'.

    Without an installed class, products cast their weights in each pass, and no supplier keeps buffers.
    """

    def choose_base_modules(self, run: Run, model: Built) -> tuple[str, ...]:
        """The patterns of the modules of a whole model whose products ignore the recipe of the precision."""

    def with_recipe(self, sites: Iterable[Site], model: Built) -> Iterable[Site]:
        """The sites; a product outside of the base modules also needs the model's recipe."""

    def only_in_other_stages(self, model: Model, own: Iterable[Site]) -> set[str]:
        """The kinds of products that ignore the recipe in this stage, because its modules are base modules."""

    def add_buffers(self, model: Model, run: Run, contents: Iterable[Filled]) -> None:
        """Register, describe and place the buffers of sites; UsageError if an offer declares impossible ones.

        Placements of parameters come first, because strategies select by them. No memory exists before that.
        """

    def updates(self, model: Model) -> list[Update]:
        """The functions that update the states of suppliers after a step."""

    def keep_casts(self, model: Model) -> None:
        """Let every unit make the copies that its products read, before its first call with new weights."""

    def copies(self, model: Model) -> list[Tensor]:
        """New copies of all weights of this rank, as units keep them: to count bytes."""

    def refuse_idle_copies(self, run: Run, model: Model) -> None:
        """Raise UsageError if a strategy gathers copies and no product of the whole model has any."""


def _needed(what: str) -> Products:
    found: Products = needed("products", what, "mplug-products")
    return found


def choose_base_modules(run: Run, model: Built) -> tuple[str, ...]:
    """The patterns of the base modules of a whole model; empty if the precision has no recipe."""
    if run.precision.recipe is None:
        return ()
    return _needed(f"trainer.precision={run.config.trainer.precision}").choose_base_modules(run, model)


def with_recipe(sites: Iterable[Site], model: Built) -> Iterable[Site]:
    """The sites, of which products outside of the base modules need the model's recipe, if it has one."""
    return sites if model.recipe is None else _needed("recipes of precisions").with_recipe(sites, model)


def only_in_other_stages(model: Model, own: Iterable[Site]) -> set[str]:
    """The kinds of products that only other stages compute by the recipe."""
    return set() if model.recipe is None else _needed("recipes of precisions").only_in_other_stages(model, own)


def add_slot_buffers(model: Model, run: Run, contents: Iterable[Filled]) -> None:
    """Add the buffers that the selected offers declare."""
    keeping = [one for one in contents if one.offer is not None and one.offer.keeps_buffers]
    if keeping:
        _needed(f"the buffers of {keeping[0].supplier}").add_buffers(model, run, keeping)


def slot_updates(model: Model) -> list[Update]:
    """The functions that update the states of suppliers after a step."""
    return _needed("buffers of suppliers").updates(model) if model.slot_buffers else []


def keep_casts(model: Model) -> None:
    """Let units keep copies of weights, if a package makes them."""
    found: Products | None = provided("products")
    if found is not None:
        found.keep_casts(model)


def copies_of(model: Model) -> list[Tensor]:
    """New copies of all weights of this rank, as units keep them."""
    found: Products | None = provided("products")
    return [] if found is None else found.copies(model)


def refuse_idle_copies(run: Run, model: Model) -> None:
    """Raise UsageError if a strategy gathers copies and no product of the whole model has any."""
    if any(placement.gathers_copies for placement in model.placements.values()):
        _needed("gathered copies of weights").refuse_idle_copies(run, model)
