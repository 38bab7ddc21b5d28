"""FP8 training with torch alone: a precision, and the matrix products of its recipes.

mplug train --precision fp8 --kernels linear=fp8
"""

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt, model_validator

from mplug import MAY_CHANGE, Offer, Precision, UsageError, hookimpl
from mplug_fp8.recipes import recipe_of

if TYPE_CHECKING:
    from mplug import Model, Run


class FP8:
    """bf16 with the operands of matrix products in FP8 (arXiv 2209.05433), masters and sums in fp32."""

    class Config(BaseModel):
        """The scales of the operands."""

        model_config = ConfigDict(extra="forbid", frozen=True)

        scaling: Literal["tensorwise", "rowwise", "blockwise"] = Field(
            "tensorwise",
            description="what has one scale: a tensor; a row; or 128 numbers of a row, and 128 x 128 of a weight",
        )
        when: Literal["current", "delayed"] = Field(
            "current",
            description="whether scales follow from the tensor itself, or from the last steps (tensorwise only)",
        )
        power_of_two: bool | None = Field(
            None, description="round scales down to powers of two; null: only if scaling is not tensorwise"
        )
        history: PositiveInt = Field(1024, description="delayed: steps whose largest values determine a scale")
        margin: NonNegativeInt = Field(0, description="delayed: divide scales by 2 to the power of it")

        @model_validator(mode="after")
        def _possible(self) -> "FP8.Config":
            if self.when == "delayed" and self.scaling != "tensorwise":
                raise ValueError(f"when=delayed needs scaling=tensorwise, not {self.scaling}; use when=current")
            if self.scaling == "blockwise" and self.power_of_two is False:
                raise ValueError("power_of_two=false needs scaling=tensorwise or rowwise; blockwise scales are powers")
            return self

    def __init__(self, config: Config) -> None:
        self.config = config

    @hookimpl
    def define_precision(self) -> Precision:
        """Formats as those of bf16, and a recipe for products."""
        recipe = recipe_of(
            self.config.scaling, self.config.when, self.config.power_of_two, self.config.history, self.config.margin
        )
        return Precision(weights="bfloat16", activations="bfloat16", gradients="bfloat16", recipe=recipe)


class FP8Products:
    """The matrix products of linear layers and experts in FP8, by torch's scaled products and Triton kernels.

    With delayed scaling also norms and activations together with the product after them.
    """

    class Config(BaseModel):
        """What is kept. The options of the recipe belong to the precision."""

        model_config = ConfigDict(extra="forbid", frozen=True)

        keep_weights: Annotated[bool, MAY_CHANGE] = Field(
            False,
            description="keep the FP8 copies of the weights of linear layers from one micro batch to the next, instead "
            "of casting in every pass: a byte for each weight (rowwise: two) for less work per micro batch",
        )

    def __init__(self, config: Config) -> None:
        self.config = config

    @hookimpl
    def offer(self, run: "Run") -> list[Offer]:
        """Products of linear layers, alone or with the norm or activation before them, and of experts."""
        named = sorted(kind for kind, plugin in run.config.kernels.kinds.items() if plugin == "kernels/fp8")
        if named and run.precision.recipe is None:
            raise UsageError(
                f"kernels.{named[0]}=fp8 computes by the recipe of a precision, and "
                f"trainer.precision={run.config.trainer.precision} has none; add --precision fp8, or remove "
                f"kernels.{named[0]}=fp8"
            )
        from mplug_fp8.suppliers import offers

        return offers(run.precision.recipe, self.config.keep_weights, run.config.kernels.kinds)

    @hookimpl
    def captures(self, run: "Run", model: "Model") -> bool | str:
        """True for the products that a GPU has replayed (tests/test_gpu_graphs.py, docs/performance.md)."""
        from mplug_fp8.suppliers import not_replayed

        offers = [(one.site.slot, one.offer) for one in model.slots if one.offer is not None]
        own = [(slot, one.suppliers[slot]) for slot, one in offers if run.hooks.plugins.get(one.plugin) is self]
        return not_replayed(own, run.precision.recipe) or True
