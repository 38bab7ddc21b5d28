"""The offers of a run's recipe."""

from functools import partial
from typing import TYPE_CHECKING, Any

from mplug import Offer, Recipe, Site
from mplug_fp8 import delayed
from mplug_fp8.grouped import RowwiseGroups
from mplug_fp8.limits import note, supports_experts, supports_linear
from mplug_fp8.products import Blockwise, Delayed, Products, Rowwise, Tensorwise
from mplug_fp8.recipes import BLOCKWISE, DELAYED, ROWWISE, TENSORWISE, Options

if TYPE_CHECKING:
    from mplug import Run

PRODUCTS: dict[str, type[Products]] = {
    TENSORWISE: Tensorwise,
    DELAYED: Delayed,
    ROWWISE: Rowwise,
    BLOCKWISE: Blockwise,
}


INNER = {"heads", "kv_heads", "mlp"}
"""Axes of inputs that backward needs in bf16 for other reasons: attention keeps its output, and a compiler computes an
activation again. Saving a copy in fp8 would add to the memory. Other inputs, as those from norms, are saved in fp8.
"""


def offers(recipe: Recipe | None) -> list[Offer]:
    """`Linear.product` and `Experts.product`. Their `supports` refuses a recipe that is unknown."""
    options = _options(recipe)
    kind = PRODUCTS[recipe.name if recipe and recipe.name in PRODUCTS else TENSORWISE]
    grouped: dict[str, Any] = {"Experts.product": RowwiseGroups(options)}
    delayed_scaling = recipe is not None and recipe.name == DELAYED
    linear = [_linear(kind(options, keeps_input), options, delayed_scaling) for keeps_input in (False, True)]
    return [*linear, Offer(grouped, supports_experts, note=note)]


def _linear(supplier: Products, options: Options, delayed_scaling: bool) -> Offer:
    """The offer of a product to those sites whose input it saves as they need."""
    product: dict[str, Any] = {"Linear.product": supplier}

    def supports(site: Site, run: "Run") -> bool | str:
        inner = "weight" in site.parameters and not INNER.isdisjoint(site.axes("weight", 1))
        return supports_linear(site, run) if inner == supplier.keeps_input else False

    if not delayed_scaling:
        return Offer(product, supports, note=note)
    return Offer(
        product,
        supports,
        note=note,
        buffers=partial(delayed.declared, history=options.history),
        step_ended=partial(delayed.step_ended, options=options),
    )


def _options(recipe: Recipe | None) -> Options:
    try:
        return Options() if recipe is None else Options.of(recipe)
    except TypeError:  # an option that this plugin does not know, which `supports` refuses
        return Options()
