"""The offers of a run's recipe."""

from functools import partial
from typing import Any

from mplug import Offer, Recipe
from mplug_fp8 import delayed
from mplug_fp8.grouped import RowwiseGroups
from mplug_fp8.limits import note, supports_experts, supports_linear
from mplug_fp8.products import Blockwise, Delayed, Products, Rowwise, Tensorwise
from mplug_fp8.recipes import BLOCKWISE, DELAYED, ROWWISE, TENSORWISE, Options

PRODUCTS: dict[str, type[Products]] = {
    TENSORWISE: Tensorwise,
    DELAYED: Delayed,
    ROWWISE: Rowwise,
    BLOCKWISE: Blockwise,
}


def offers(recipe: Recipe | None) -> list[Offer]:
    """`Linear.product` and `Experts.product`. Their `supports` refuses a recipe that is unknown."""
    options = _options(recipe)
    supplier = PRODUCTS[recipe.name if recipe and recipe.name in PRODUCTS else TENSORWISE](options)
    product: dict[str, Any] = {"Linear.product": supplier}
    grouped: dict[str, Any] = {"Experts.product": RowwiseGroups(options)}
    linear = Offer(product, supports_linear, note=note)
    if recipe and recipe.name == DELAYED:
        linear = Offer(
            product,
            supports_linear,
            note=note,
            buffers=partial(delayed.declared, history=options.history),
            step_ended=partial(delayed.step_ended, options=options),
        )
    return [linear, Offer(grouped, supports_experts, note=note)]


def _options(recipe: Recipe | None) -> Options:
    try:
        return Options() if recipe is None else Options.of(recipe)
    except TypeError:  # an option that this plugin does not know, which `supports` refuses
        return Options()
