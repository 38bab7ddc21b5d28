"""Products by QuACK, CuTe DSL kernels for Hopper: an MLP with its activation fused into them, and those of experts."""

from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from mplug import MAY_CHANGE, Offer, hookimpl

if TYPE_CHECKING:
    from mplug import Model, Run

EXPERTS = frozenset({"Experts.product", "Experts.compute"})


class Quack:
    """GELU fused into the matrix products of an MLP, and the grouped products of experts, in bf16 on Hopper GPUs."""

    class Config(BaseModel):
        """What is fused."""

        model_config = ConfigDict(extra="forbid", frozen=True)

        fuse_experts: Annotated[bool, MAY_CHANGE] = Field(
            False, description="compute the SwiGLU of experts within their products, not in a kernel of its own"
        )

    def __init__(self, config: Config) -> None:
        self.config = config

    @hookimpl
    def captures(self, run: "Run", model: "Model") -> bool | str:
        """True for an MLP, whose kernels read everything from tensors (tests/test_gpu_graphs.py)."""
        filled = {one.site.slot for one in model.slots if run.hooks.plugins.get(one.supplier) is self}
        if untested := sorted(filled & EXPERTS):
            return f"has not been tested in a CUDA graph with {untested[0]}"
        return True

    @hookimpl
    def offer(self) -> list[Offer]:
        """Offer `MLP.core`, an MLP between its collectives, and experts: whole ones with SwiGLU, or their products."""
        from mplug_quack.experts import compute
        from mplug_quack.grouped import QuackGroups
        from mplug_quack.limits import supports_experts, supports_mlp, supports_swiglu_experts
        from mplug_quack.mlp import core

        grouped: dict[str, Any] = {"Experts.product": QuackGroups()}
        whole = [Offer({"Experts.compute": compute}, supports_swiglu_experts, fallback=True)]
        return [
            Offer({"MLP.core": core}, supports_mlp, partial=True),
            *(whole if self.config.fuse_experts else []),
            Offer(grouped, supports_experts, partial=True),
        ]
