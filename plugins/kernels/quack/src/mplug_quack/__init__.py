"""Products by QuACK, CuTe DSL kernels for Hopper: an MLP with its activation fused into them, and those of experts."""

from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict

from mplug import Offer, hookimpl

if TYPE_CHECKING:
    from mplug import Model, Run

EXPERTS = "Experts.product"


class Quack:
    """GELU fused into the matrix products of an MLP, and the grouped products of experts, in bf16 on Hopper GPUs."""

    class Config(BaseModel):
        """No options."""

        model_config = ConfigDict(extra="forbid", frozen=True)

    def __init__(self, config: Config) -> None:
        self.config = config

    @hookimpl
    def captures(self, run: "Run", model: "Model") -> bool | str:
        """True for an MLP, whose kernels read everything from tensors (tests/test_gpu_graphs.py)."""
        filled = {one.site.slot for one in model.slots if run.hooks.plugins.get(one.supplier) is self}
        return EXPERTS not in filled or f"has not been tested in a CUDA graph with {EXPERTS}"

    @hookimpl
    def offer(self) -> list[Offer]:
        """Offer `MLP.core`, an MLP between its collectives, and the products of experts."""
        from mplug_quack.grouped import QuackGroups
        from mplug_quack.limits import supports_experts, supports_mlp
        from mplug_quack.mlp import CORE

        grouped: dict[str, Any] = {EXPERTS: QuackGroups()}
        return [Offer({"MLP.core": CORE}, supports_mlp, partial=True), Offer(grouped, supports_experts, partial=True)]
