"""A precision: the number formats of a run, as a plugin of the kind `precisions` states them. Imports no torch.

    class Half:
        class Config(BaseModel): ...

        @hookimpl
        def define_precision(self) -> Precision:
            return Precision(weights="bfloat16", activations="bfloat16", gradients="bfloat16")

A format is the name of an attribute of torch: 'bfloat16'.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal, get_args

from mplug.errors import listed, suggest
from mplug.precisions.dtypes import FORMATS

if TYPE_CHECKING:
    import torch

LossScaling = Literal["none", "dynamic"]
FLOATING = {name: known for name, known in FORMATS.items() if known.is_floating}
SUM_FORMATS = {
    name.replace("bfloat", "bf").replace("float", "fp"): name for name, known in FLOATING.items() if known.bytes >= 2
}
"""Words of configs for the formats in which torch adds: 'bf16' -> the attribute of torch."""


def rounding_of_sums(word: str) -> float | None:
    """The relative error of gradients that are rounded to a format and summed over a few ranks in it.

    None if the format is at least fp32: then sums are in the format of the masters, and exact up to its rounding.
    """
    chosen = FLOATING[SUM_FORMATS[word]]
    return None if chosen.holds(FLOATING["float32"]) else 2.0 ** (2 - chosen.significand)


@dataclass(frozen=True)
class Recipe:
    """How the matrix products of a model compute if they do not compute in the precision's own formats (TF32).

    The host adds `need` to the needs of every slot that computes such a product (`mplug.slot_kinds.PRODUCTS`), outside
    of the base modules. So only a supplier that states the need in its `supports` fills the slot; the host refuses
    every other supplier and the composition in plain torch. `name` is the name of the computation, the same for every
    supplier that implements it. `options` are data for the suppliers, which read them from `run.precision.recipe`; the
    host only prints them.
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def need(self) -> str:
        """The word in `site.needs` that a supplier must offer."""
        return f"recipe '{self.name}'"


@dataclass(frozen=True)
class Precision:
    """The number formats of a run. Formats are names of torch's dtypes.

    - `weights`: the parameters that a model computes with. `activations`: what its modules take and return. Both are
      the same format today, because modules multiply one by the other.
    - `masters`: what the optimizer updates, the sums of gradients over micro batches and ranks, and the norm. It must
      hold every number of fp32 and of `weights` exactly.
    - `gradients`: a gradient that is one product, to which nothing is ever added. It is `weights` or `masters`; every
      other gradient has the format `masters`.
    - `loss_scaling`: 'dynamic' scales the loss (`trainer.loss_scale`), for formats whose range is smaller than fp32's.
    - `recipe`: how matrix products compute, if they do not compute in `weights` and `activations`.
    - `base_modules`: patterns of modules whose products ignore the recipe. None: the first and the last unit of every
      row of blocks, all other units (embedding, head), and the modules that the model's plan names
      (`Plan.base_modules`). `trainer.base_modules` replaces these patterns.
    """

    weights: str
    activations: str
    masters: str = "float32"
    gradients: str = "float32"
    loss_scaling: LossScaling = "none"
    recipe: Recipe | None = None
    base_modules: tuple[str, ...] | None = None

    @property
    def weight_dtype(self) -> "torch.dtype":
        """The dtype of the parameters that a model computes with."""
        return _dtype(self.weights)

    @property
    def activation_dtype(self) -> "torch.dtype":
        """The dtype of what modules take and return."""
        return _dtype(self.activations)

    @property
    def master_dtype(self) -> "torch.dtype":
        """The dtype of masters, of sums of gradients and of losses."""
        return _dtype(self.masters)

    @property
    def gradient_dtype(self) -> "torch.dtype":
        """The dtype of a gradient that is one product."""
        return _dtype(self.gradients)

    def sum_dtype(self, word: str) -> "torch.dtype":
        """The dtype in which gradients are summed over ranks if a config says `word`: the masters' from fp32 on."""
        return self.master_dtype if rounding_of_sums(word) is None else _dtype(SUM_FORMATS[word])

    def faults(self) -> Iterator[str]:
        """One clause for every part that breaks the contract."""
        formats = {name: getattr(self, name) for name in ("weights", "activations", "masters", "gradients")}
        unknown = {name: word for name, word in formats.items() if word not in FLOATING}
        for name, word in unknown.items():
            yield f"{name}={word!r} is not a floating-point format{suggest(str(word), FLOATING)} ({listed(FLOATING)})"
        if not unknown:
            yield from self._misfits()
        if self.loss_scaling not in get_args(LossScaling):
            yield f"loss_scaling={self.loss_scaling!r} is not one of {listed(map(repr, get_args(LossScaling)))}"
        if self.recipe is not None and not (isinstance(self.recipe, Recipe) and self.recipe.name):
            yield f"recipe={self.recipe!r} is not a mplug.Recipe with a name"
        if self.recipe is None and self.base_modules is not None:
            yield "it names base_modules and has no recipe, so all modules compute in the same formats"

    def _misfits(self) -> Iterator[str]:
        """The faults of formats that do not fit each other."""
        if FLOATING[self.weights].bytes < 2:
            yield f"weights={self.weights!r} has no arithmetic in torch; state the format of products in a recipe"
        if self.activations != self.weights:
            yield (
                f"activations={self.activations!r} differ from weights={self.weights!r}, and modules multiply one by "
                f"the other; state the format of products in a recipe"
            )
        for name in ("float32", self.weights):
            if not FLOATING[self.masters].holds(FLOATING[name]):
                yield f"masters={self.masters!r} do not hold every number of {name}"
        if self.gradients not in (self.weights, self.masters):
            yield f"gradients={self.gradients!r} is neither weights={self.weights!r} nor masters={self.masters!r}"

    def as_mapping(self) -> dict[str, Any]:
        """The precision as plain data, for records."""
        own = {one.name: getattr(self, one.name) for one in fields(self)}
        options = {name: str(value) for name, value in self.recipe.options.items()} if self.recipe else {}
        recipe = self.recipe and {"name": self.recipe.name, "options": options}
        return {**own, "recipe": recipe, "base_modules": self.base_modules and list(self.base_modules)}


def _dtype(name: str) -> "torch.dtype":
    import torch  # keeps torch out of start-up

    dtype: torch.dtype = getattr(torch, name)
    return dtype
