"""Products by QuACK, CuTe DSL kernels for Hopper: an MLP with its activation fused into them, and those of experts."""

from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict

from mplug import Offer, hookimpl

if TYPE_CHECKING:
    from mplug import Model

EXPERTS = "Experts.product"


class Quack:
    """GELU fused into the matrix products of an MLP, and the grouped products of experts, in bf16 on Hopper GPUs."""

    class Config(BaseModel):
        """No options."""

        model_config = ConfigDict(extra="forbid", frozen=True)

    def __init__(self, config: Config) -> None:
        self.config = config

    @hookimpl
    def captures(self, model: "Model") -> bool | str:
        """True for an MLP, whose kernels read everything from tensors (tests/test_gpu_graphs.py)."""
        from mplug_quack.grouped import QuackGroups

        filled = [one.offer.suppliers for one in model.slots if one.offer is not None]
        if any(isinstance(suppliers.get(EXPERTS), QuackGroups) for suppliers in filled):
            return f"has not been tested in a CUDA graph with {EXPERTS}"
        return True

    @hookimpl
    def offer(self) -> list[Offer]:
        """Offer `MLP.core`, the MLP between its collectives, and the grouped product of experts."""
        from mplug_quack.grouped import QuackGroups
        from mplug_quack.limits import supports_experts, supports_mlp
        from mplug_quack.mlp import core

        grouped: dict[str, Any] = {EXPERTS: QuackGroups()}
        return [Offer({"MLP.core": core}, supports_mlp, partial=True), Offer(grouped, supports_experts, partial=True)]
