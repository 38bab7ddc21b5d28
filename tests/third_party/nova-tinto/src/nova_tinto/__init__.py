"""Precisions whose products have operands of few bits, and one with wide masters."""

from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, Field

from mplug import Offer, Precision, Recipe, Site, hookimpl

if TYPE_CHECKING:
    from mplug import Run

SHORT = "operands of few bits"
"""The name of the recipe. Its option `bits` is the number of bits of significand."""


class Tinto:
    """fp32, with the operands of matrix products rounded to few bits."""

    class Config(BaseModel):
        """The width of operands."""

        model_config = ConfigDict(extra="forbid", frozen=True)

        bits: int = Field(11, ge=2, le=24, description="bits of significand of an operand; 11: TF32")

    def __init__(self, config: Config) -> None:
        self.config = config

    @hookimpl
    def define_precision(self) -> Precision:
        """Everything in fp32, and a recipe for products."""
        return Precision(weights="float32", activations="float32", recipe=Recipe(SHORT, {"bits": self.config.bits}))


class Patient:
    """fp32 weights, and fp64 masters and sums of gradients."""

    class Config(BaseModel):
        """No options."""

        model_config = ConfigDict(extra="forbid", frozen=True)

    def __init__(self, config: Config) -> None:
        self.config = config

    @hookimpl
    def define_precision(self) -> Precision:
        """The masters are wider than fp32."""
        return Precision(weights="float32", activations="float32", masters="float64", gradients="float64")


class Press:
    """The products of linear layers with operands of few bits, for precisions that ask for them."""

    class Config(BaseModel):
        """No options."""

        model_config = ConfigDict(extra="forbid", frozen=True)

    def __init__(self, config: Config) -> None:
        self.config = config

    @hookimpl
    def offer(self, run: "Run") -> list[Offer]:
        """`Linear.gemm`, with the width that the precision of the run states."""
        from nova_tinto.pressed import gemm_of

        recipe = run.precision.recipe
        bits = recipe.options["bits"] if recipe is not None and recipe.name == SHORT else 24
        need = frozenset({Recipe(SHORT).need})
        return [Offer({"Linear.gemm": gemm_of(bits)}, supports, serves=need, requires=need)]


def supports(site: Site, run: "Run") -> bool | str:
    """Runs whose activations have the format that it rounds."""
    if run.precision.activations != "float32":
        return f"it rounds fp32 operands, and trainer.precision computes in {run.precision.activations}"
    return True
