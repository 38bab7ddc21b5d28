"""Whole products of linear layers that read rounded copies of the weights and keep rounded inputs.

The grid of the inputs spans the largest value of the last step, that of a weight is fixed.
"""

from collections.abc import Mapping

from pydantic import BaseModel, ConfigDict, Field, PositiveInt

from mplug import Offer, Site, SlotBuffer, hookimpl

TOKENS = ("batch", "sequence")


class Rounded:
    """Products of operands that are rounded to grids."""

    class Config(BaseModel):
        """The grids."""

        model_config = ConfigDict(extra="forbid", frozen=True)

        levels: PositiveInt = Field(64, description="numbers of a grid on each side of zero")

    def __init__(self, config: Config) -> None:
        self.config = config

    @hookimpl
    def offer(self) -> list[Offer]:
        """The products, and the largest inputs."""
        from acme_product.products import Rounding, step_ended

        product = Rounding(self.config.levels)
        return [Offer({"Linear.product": product}, buffers=buffers, step_ended=step_ended)]


def buffers(site: Site) -> Mapping[str, SlotBuffer]:
    """The largest input of a step, and that of the last step."""
    return {
        "largest": SlotBuffer(over=(*TOKENS, *site.axes("weight", 1)), reduction="max"),
        "span": SlotBuffer(),
    }
