"""Products by QuACK, CuTe DSL kernels for Hopper: an MLP with its activation fused into them, and those of experts."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from mplug import Offer, hookimpl

EXPERTS = "Experts.product"


class Quack:
    """GELU fused into the matrix products of an MLP, and the grouped products of experts, in bf16 on Hopper GPUs."""

    class Config(BaseModel):
        """Which products of an MLP."""

        model_config = ConfigDict(extra="forbid", frozen=True)

        products: Literal["fused", "all"] = Field(
            "fused",
            description="products of an MLP that QuACK computes: those with the activation in them (fused), or the "
            "output, the gradient of the input and those of weights, too (all; no GPU has run it yet)",
        )

    captures = True
    """The kernels read everything from tensors."""

    def __init__(self, config: Config) -> None:
        self.config = config

    @hookimpl
    def offer(self) -> list[Offer]:
        """Offer `MLP.core`, an MLP between its collectives, and the products of experts."""
        from mplug_quack.grouped import QuackGroups
        from mplug_quack.limits import supports_experts, supports_mlp
        from mplug_quack.mlp import CORES

        mlp, grouped = {"MLP.core": CORES[self.config.products]}, dict[str, Any]({EXPERTS: QuackGroups()})
        return [Offer(mlp, supports_mlp, partial=True), Offer(grouped, supports_experts, partial=True)]
