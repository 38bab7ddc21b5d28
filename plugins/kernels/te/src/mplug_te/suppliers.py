"""The offers of a run: products in half precision, those of the run's recipe, attention and norms."""

from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

from mplug import Offer
from mplug_te.activations import FUNCTIONS, ActivationProduct
from mplug_te.attention import SERVED, core, supports, varies
from mplug_te.grouped import groups_by
from mplug_te.limits import (
    RECIPES,
    refuses_blackwell,
    supports_activation,
    supports_experts,
    supports_fp8,
    supports_half,
    supports_norm,
    supports_norm_product,
)
from mplug_te.linear import DelayedProduct, HalfProduct, product_of
from mplug_te.norm import norm_residual
from mplug_te.prologues import NORMS, NormProduct
from mplug_te.recipes import BLACKWELL, DELAYED, NAMES, Options, delayed_scaling_of, options_of

if TYPE_CHECKING:
    from mplug import Recipe, Run

EXPERTS = "Experts.product"


REPLAYED = (HalfProduct, DelayedProduct)
"""The suppliers that a GPU has replayed in a CUDA graph, to the bit."""


def not_replayed(supplied: Iterable[tuple[str, Any]], recipe: "Recipe | None") -> str:
    """Why a CUDA graph cannot replay suppliers of slots, as a clause about this plugin; empty if it can."""
    untested = {slot for slot, supplier in supplied if type(supplier) not in REPLAYED}
    if EXPERTS in untested:
        return "reads the number of rows of each expert on the CPU (kernels.experts)"
    if not untested:
        return ""
    by = f" by '{recipe.name}'" if recipe is not None and "Linear.product" in untested else ""
    return f"has not been tested in a CUDA graph with {' and '.join(sorted(untested))}{by}"


def offers(run: "Run") -> list[Offer]:
    """All offers. Experts and fused activations need a config that names them: no benchmark has compared them yet."""
    named = run.config.kernels.kinds
    half: list[Offer] = [Offer({"Linear.product": HalfProduct()}, supports_half, serves=RECIPES)]
    if "experts" in named:
        half.append(Offer({EXPERTS: groups_by("", Options())}, supports_half, serves=RECIPES))
    return [
        *half,
        *_by_recipe(run.precision.recipe, set(named)),
        Offer({"Attention.core": core(run.config.trainer.deterministic)}, supports, varies, serves=SERVED),
        Offer({"Norm.norm_residual": norm_residual}, supports_norm),
    ]


def _by_recipe(recipe: "Recipe | None", named: set[str]) -> list[Offer]:
    """The offers of products by a recipe; empty if this plugin does not know the recipe.

    Norms together with products are offered for delayed scaling; with any other recipe only if they are `named`, so
    that `supports` states the reason.
    """
    if recipe is None or recipe.name not in (*NAMES, *BLACKWELL):
        return []
    name = recipe.name
    if name in BLACKWELL:
        refuses, needs = partial(refuses_blackwell, name), frozenset({recipe.need})
        slots = ("Linear.product", EXPERTS) if "experts" in named else ("Linear.product",)
        return [Offer({slot: HalfProduct()}, refuses, serves=needs, requires=needs) for slot in slots]
    known = options_of(recipe)
    options = Options() if isinstance(known, str) else known  # `supports` states the reason
    needs = frozenset({recipe.need})
    keeping: dict[str, Any] = {"requires": needs}
    if name == DELAYED:
        scaling = delayed_scaling_of(options)
        keeping |= {"buffers": scaling.buffers, "step_ended": scaling.step_ended}
    delayed = DelayedProduct(options.forward, options.gradient, options.power_of_two)
    found = [Offer({"Linear.product": product_of(name, options)}, partial(supports_fp8, name), serves=needs, **keeping)]
    if name == DELAYED or "norm_product" in named:
        norm: dict[str, Any] = {"Linear.norm_product": NormProduct(delayed)}
        found.append(Offer(norm, partial(supports_norm_product, name), serves=needs.union(NORMS), **keeping))
    if "activation_product" in named:
        activation: dict[str, Any] = {"Linear.activation_product": ActivationProduct(delayed)}
        found.append(
            Offer(activation, partial(supports_activation, name), serves=needs | {*FUNCTIONS, "gelu"}, **keeping)
        )
    if "experts" in named:
        found.append(
            Offer({EXPERTS: groups_by(name, options)}, partial(supports_experts, name), serves=needs, **keeping)
        )
    return found
