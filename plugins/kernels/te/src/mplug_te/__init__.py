"""Linear layers and experts in FP8 and bf16, attention and norms by NVIDIA's Transformer Engine 2.x.

The plugin calls the layer below Transformer Engine's modules, which are hidden from torch's compiler. It imports
Transformer Engine only if a run names the plugin.
"""

from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt

from mplug import Offer, Precision, hookimpl
from mplug_te.recipes import Scaling, recipe_of

if TYPE_CHECKING:
    from mplug import Model, Run


class TransformerEngine:
    """Linear layers and experts in FP8 and bf16, attention and norms by Transformer Engine, on NVIDIA GPUs."""

    class Config(BaseModel):
        """No options."""

        model_config = ConfigDict(extra="forbid", frozen=True)

    def __init__(self, config: Config) -> None:
        self.config = config

    @hookimpl
    def offer(self, run: "Run") -> list[Offer]:
        """Offers of products in half precision and by the run's recipe, of attention, and of norms."""
        from mplug_te.suppliers import offers

        return offers(run)

    @hookimpl
    def captures(self, run: "Run", model: "Model") -> bool | str:
        """True for the products that a GPU has replayed to the bit (tests/test_gpu_graphs.py)."""
        from mplug_te.suppliers import not_replayed

        offers = [(one.site.slot, one.offer) for one in model.slots if one.offer is not None]
        own = [(slot, one.suppliers[slot]) for slot, one in offers if run.hooks.plugins.get(one.plugin) is self]
        return not_replayed(own, run.precision.recipe) or True


class FP8:
    """Matrix products in FP8, everything else as in bf16. The first and last blocks and the head stay in bf16."""

    class Config(BaseModel):
        """The recipe of the products."""

        model_config = ConfigDict(extra="forbid", frozen=True)

        recipe: Scaling = Field(
            "delayed",
            description="delayed: scales of tensors come from the last steps; tensorwise: from the tensors themselves; "
            "blockwise: a scale for 128 numbers; mxfp8, nvfp4: small blocks, for Blackwell GPUs",
        )
        power_of_two: bool | None = Field(
            None, description="round scales down to powers of two; null: only if the recipe is blockwise"
        )
        history: PositiveInt = Field(1024, description="delayed: steps whose largest values determine a scale")
        margin: NonNegativeInt = Field(0, description="delayed: scales are divided by 2 to the power of it")

    def __init__(self, config: Config) -> None:
        self.config = config

    @hookimpl
    def define_precision(self) -> Precision:
        """bf16 with a recipe."""
        own = self.config
        recipe = recipe_of(own.recipe, own.power_of_two, own.history, own.margin)
        return Precision(weights="bfloat16", activations="bfloat16", gradients="bfloat16", recipe=recipe)
