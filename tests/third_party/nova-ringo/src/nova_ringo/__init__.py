"""Attention block by block (FlashAttention-2, arXiv 2307.08691) in plain torch, with a backward pass of its own."""

from functools import partial
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, Field, PositiveInt

from mplug import Offer, Site, hookimpl

if TYPE_CHECKING:
    from mplug import Run


class Ringo:
    """Causal attention with grouped heads, in memory that grows with the length of a sequence, not with its square."""

    class Config(BaseModel):
        """The size of a block."""

        model_config = ConfigDict(extra="forbid", frozen=True)

        block: PositiveInt = Field(128, description="queries and keys whose scores are computed at a time")

    def __init__(self, config: Config) -> None:
        self.config = config

    @hookimpl
    def offer(self) -> list[Offer]:
        """The attention core."""
        from nova_ringo.blocks import attention

        return [Offer({"Attention.core": partial(attention, block=self.config.block)}, supports)]


def supports(site: Site, run: "Run") -> bool | str:
    """Any heads, widths and lengths; no dropout, and nothing beyond the attended values."""
    if site.module.dropout > 0:
        return f"it drops no attention weights, and this site's dropout is {site.module.dropout}"
    return True
