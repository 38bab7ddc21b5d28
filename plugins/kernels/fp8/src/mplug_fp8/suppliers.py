"""The offers of a run's recipe."""

from collections.abc import Callable, Container, Iterable
from typing import TYPE_CHECKING, Any

from mplug import Offer, Recipe, Site
from mplug_fp8.grouped import RowwiseGroups
from mplug_fp8.limits import note, supports_activation, supports_experts, supports_linear, supports_norm
from mplug_fp8.products import Blockwise, Delayed, Rowwise, Tensorwise
from mplug_fp8.prologues import ACTIVATIONS, NORMS, ActivationProduct, NormProduct
from mplug_fp8.recipes import BLOCKWISE, DELAYED, GRADIENT, INPUT, LIMITS, ROWWISE, TENSORWISE, Options
from mplug_fp8.scaled import Products
from mplug_nn import DelayedScaling, FusedProduct

if TYPE_CHECKING:
    from mplug import Run

Supports = Callable[..., bool | str]
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


REPLAYED = (Tensorwise, Delayed, Blockwise, NormProduct, ActivationProduct)
"""The suppliers that a GPU has replayed in a CUDA graph: to the bit, or in a benchmark (docs/performance.md)."""


def not_replayed(supplied: Iterable[tuple[str, Any]], recipe: Recipe | None) -> str:
    """Why a CUDA graph cannot replay suppliers of slots, as a clause about this plugin; empty if it can."""
    untested = {slot for slot, supplier in supplied if type(supplier) not in REPLAYED}
    if not untested:
        return ""
    by = f" by '{recipe.name}'" if recipe is not None else ""
    return f"has not been tested in a CUDA graph with {' and '.join(sorted(untested))}{by}"


def offers(recipe: Recipe | None, keeps_weights: bool, named: Container[str] = ()) -> list[Offer]:
    """Products of linear layers, of norms and activations with these, and of experts.

    Their `supports` refuses a recipe that is unknown. Norms and activations are offered for delayed scaling; with any
    other recipe only if they are `named`, so that `supports` states the reason.
    """
    options = _options(recipe)
    kind = PRODUCTS[recipe.name if recipe and recipe.name in PRODUCTS else TENSORWISE]
    grouped: dict[str, Any] = {"Experts.product": RowwiseGroups(options)}
    delayed = recipe is not None and recipe.name == DELAYED
    needs = frozenset() if recipe is None else frozenset({recipe.need})
    linear = [
        _linear(kind(options, keeps_input, keeps_weights), options, delayed, needs) for keeps_input in (False, True)
    ]
    product = Delayed(options, keeps_weights=keeps_weights)
    fused = [_fused(kind, product, options, needs) for kind in FUSED if delayed or kind in named]
    return [*linear, *fused, Offer(grouped, supports_experts, note=note, serves=needs, requires=needs)]


def _linear(supplier: Products, options: Options, delayed: bool, needs: frozenset[str]) -> Offer:
    """The offer of a product to those sites whose input it saves as they need."""
    product: dict[str, Any] = {"Linear.product": supplier}

    def supports(site: Site, run: "Run") -> bool | str:
        inner = "weight" in site.parameters and not INNER.isdisjoint(site.axes("weight", 1))
        return supports_linear(site, run) if inner == supplier.keeps_input else False

    if not delayed:
        return Offer(product, supports, note=note, serves=needs, requires=needs)
    scaling = delayed_scaling_of(options)
    kept: dict[str, Any] = {"buffers": scaling.buffers, "step_ended": scaling.step_ended}
    return Offer(product, supports, note=note, serves=needs, requires=needs, **kept)


FUSED: dict[str, tuple[type[FusedProduct], Supports, tuple[str, ...]]] = {
    "norm_product": (NormProduct, supports_norm, NORMS),
    "activation_product": (ActivationProduct, supports_activation, ACTIVATIONS),
}
"""Kinds of slots of a product together with what computes its input, and what they compute."""


def _fused(kind: str, product: Delayed, options: Options, needs: frozenset[str]) -> Offer:
    make: Any
    make, supports, prologues = FUSED[kind]
    scaling, supplier = delayed_scaling_of(options), make(product)
    buffers = {"buffers": scaling.buffers, "step_ended": scaling.step_ended}
    serves = needs.union(prologues)
    return Offer({f"Linear.{kind}": supplier}, supports, note=note, serves=serves, requires=needs, **buffers)


def delayed_scaling_of(options: Options) -> DelayedScaling:
    """The scales of inputs and gradients. A weight is cast once for each version, so its scale is its own."""
    limits = {INPUT: LIMITS[options.forward], GRADIENT: LIMITS[options.gradient]}
    return DelayedScaling(limits, options.history, options.margin, options.power_of_two)


def _options(recipe: Recipe | None) -> Options:
    try:
        return Options() if recipe is None else Options.of(recipe)
    except TypeError:  # an option that this plugin does not know, which `supports` refuses
        return Options()
