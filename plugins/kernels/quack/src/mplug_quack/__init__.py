"""The MLP with its activation fused into the matrix products, by QuACK: CuTe DSL kernels for Hopper."""

from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict

from mplug import Offer, Site, hookimpl

if TYPE_CHECKING:
    from mplug import Run


class Quack:
    """GELU fused into the matrix products of an MLP, in bf16 on Hopper GPUs."""

    class Config(BaseModel):
        """No options."""

        model_config = ConfigDict(extra="forbid", frozen=True)

    captures = True
    """The kernels of an MLP read everything from tensors (tests/test_gpu_graphs.py)."""

    def __init__(self, config: Config) -> None:
        self.config = config

    @hookimpl
    def offer(self) -> list[Offer]:
        """Offer `MLP.core`, the MLP between its collectives."""
        from mplug_quack.mlp import core

        return [Offer({"MLP.core": core}, supports, partial=True)]


def supports(site: Site, run: "Run") -> bool | str:
    """True for GELU, exact or by tanh, in bf16 on a Hopper GPU with QuACK installed; else the reason."""
    from mplug_quack.mlp import ALIGNED, KINDS
    from mplug_quack.needs import missing

    if site.module.kind not in KINDS:
        return f"it supports the activations {' and '.join(KINDS)}, and this site's activation is {site.module.kind}"
    if run.device != "cuda":
        return "it needs a Hopper GPU, and this run is on the CPU"
    if run.precision.activations != "bfloat16":
        word, format_ = run.config.trainer.precision, run.precision.activations
        return f"it computes in bf16, and trainer.precision={word} computes in {format_}"
    widths = tuple(site.module.up.weight.shape)
    if any(width % ALIGNED for width in widths):
        return f"it supports multiples of {ALIGNED} as widths, and this MLP has widths {widths[1]} and {widths[0]}"
    return missing() or True
