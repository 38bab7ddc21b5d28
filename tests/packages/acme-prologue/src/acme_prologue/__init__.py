"""Norms and activations together with the product of their result: backward computes the results again.

Each site keeps the largest result of the last step.
"""

from collections.abc import Mapping

from pydantic import BaseModel, ConfigDict

from mplug import Offer, Site, SlotBuffer, hookimpl

KINDS = ("layernorm", "rmsnorm", "gelu", "swiglu")


class Remembering:
    """Products that keep what their prologue reads, not its result."""

    class Config(BaseModel):
        """No options."""

        model_config = ConfigDict(extra="forbid", frozen=True)

    def __init__(self, config: Config) -> None:
        self.config = config

    @hookimpl
    def offer(self) -> list[Offer]:
        """One supplier for both slots."""
        from acme_prologue.products import Again, step_ended

        product = Again()
        slots = ("Linear.norm_product", "Linear.activation_product")
        return [Offer({slot: product}, serves=KINDS, buffers=buffers, step_ended=step_ended) for slot in slots]


def buffers(site: Site) -> Mapping[str, SlotBuffer]:
    """The largest result of a step, and that of the last step."""
    inputs = site.axes("weight", 1)
    return {"largest": SlotBuffer(over=("batch", "sequence", *inputs), reduction="max"), "last": SlotBuffer()}
