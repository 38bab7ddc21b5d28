"""The offers of a run: products in half precision, those of the run's recipe, attention and norms."""

from functools import partial
from typing import TYPE_CHECKING, Any

from mplug import Offer
from mplug_te.activations import ActivationProduct
from mplug_te.attention import core, supports, varies
from mplug_te.grouped import groups_by
from mplug_te.limits import (
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
from mplug_te.prologues import NormProduct
from mplug_te.recipes import BLACKWELL, DELAYED, NAMES, Options, delayed_scaling_of, options_of

if TYPE_CHECKING:
    from mplug import Recipe, Run

EXPERTS = "Experts.product"


def offers(run: "Run") -> list[Offer]:
    """All offers. The products of experts in half precision need a config that names them: torch's do not wait."""
    named = run.config.kernels.kinds
    half: list[Offer] = [Offer({"Linear.product": HalfProduct()}, supports_half)]
    if "experts" in named:
        half.append(Offer({EXPERTS: groups_by("", Options())}, supports_half))
    return [
        *half,
        *_by_recipe(run.precision.recipe, set(named)),
        Offer({"Attention.core": core(run.config.trainer.deterministic)}, supports, varies),
        Offer({"Norm.norm_residual": norm_residual}, supports_norm),
    ]


def _by_recipe(recipe: "Recipe | None", named: set[str]) -> list[Offer]:
    """The offers of products by a recipe; empty if this plugin does not know the recipe.

    Norms and activations together with products are offered for delayed scaling; with any other recipe only if they are
    `named`, so that `supports` states the reason.
    """
    if recipe is None or recipe.name not in (*NAMES, *BLACKWELL):
        return []
    name = recipe.name
    if name in BLACKWELL:
        refuses = partial(refuses_blackwell, name)
        return [Offer({"Linear.product": HalfProduct()}, refuses), Offer({EXPERTS: groups_by("", Options())}, refuses)]
    known = options_of(recipe)
    options = Options() if isinstance(known, str) else known  # `supports` states the reason
    keeping: dict[str, Any] = {}
    if name == DELAYED:
        scaling = delayed_scaling_of(options)
        keeping = {"buffers": scaling.buffers, "step_ended": scaling.step_ended}
    delayed = DelayedProduct(options.forward, options.gradient, options.power_of_two)
    fused: dict[str, tuple[Any, Any]] = {
        "norm_product": (NormProduct(delayed), partial(supports_norm_product, name)),
        "activation_product": (
            ActivationProduct(delayed),
            partial(supports_activation, name, "activation_product" in named),
        ),
    }
    return [
        Offer({"Linear.product": product_of(name, options)}, partial(supports_fp8, name), **keeping),
        Offer({EXPERTS: groups_by(name, options)}, partial(supports_experts, name)),
        *(
            Offer({f"Linear.{kind}": supplier}, supports_it, **keeping)
            for kind, (supplier, supports_it) in fused.items()
            if name == DELAYED or kind in named
        ),
    ]
