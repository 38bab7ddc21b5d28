"""The offers of a run's recipe."""

from collections.abc import Callable, Container
from functools import partial
from typing import Any

from mplug import Offer, Recipe
from mplug.nn import FusedProduct
from mplug_fp8 import delayed
from mplug_fp8.grouped import RowwiseGroups
from mplug_fp8.limits import note, supports_activation, supports_experts, supports_linear, supports_norm
from mplug_fp8.products import Blockwise, Delayed, Products, Rowwise, Tensorwise
from mplug_fp8.prologues import ActivationProduct, NormProduct
from mplug_fp8.recipes import BLOCKWISE, DELAYED, ROWWISE, TENSORWISE, Options

Supports = Callable[..., bool | str]
PRODUCTS: dict[str, type[Products]] = {
    TENSORWISE: Tensorwise,
    DELAYED: Delayed,
    ROWWISE: Rowwise,
    BLOCKWISE: Blockwise,
}


def offers(recipe: Recipe | None, named: Container[str] = ()) -> list[Offer]:
    """Products of linear layers, of norms and activations with these, and of experts.

    Their `supports` refuses a recipe that is unknown. Norms and activations are offered for delayed scaling; with any
    other recipe only if they are `named`, so that `supports` states the reason.
    """
    options = _options(recipe)
    supplier = PRODUCTS[recipe.name if recipe and recipe.name in PRODUCTS else TENSORWISE](options)
    delaying: dict[str, Any] = {}
    if recipe and recipe.name == DELAYED:
        declared = partial(delayed.declared, history=options.history)
        delaying = {"buffers": declared, "step_ended": partial(delayed.step_ended, options=options)}
    suppliers: dict[str, tuple[FusedProduct, Supports]] = {
        "norm_product": (NormProduct(Delayed(options)), supports_norm),
        "activation_product": (ActivationProduct(Delayed(options)), supports_activation),
    }
    return [
        Offer({"Linear.product": supplier}, supports_linear, note=note, **delaying),
        Offer({"Experts.product": RowwiseGroups(options)}, supports_experts, note=note),
        *(
            Offer({f"Linear.{kind}": fused}, supports, note=note, **delaying)
            for kind, (fused, supports) in suppliers.items()
            if delaying or kind in named
        ),
    ]


def _options(recipe: Recipe | None) -> Options:
    try:
        return Options() if recipe is None else Options.of(recipe)
    except TypeError:  # an option that this plugin does not know, which `supports` refuses
        return Options()
