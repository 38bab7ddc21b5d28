"""Attention by torch's scaled_dot_product_attention, which picks the fastest backend that the machine has."""

from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict

from mplug import Offer, Site, hookimpl

if TYPE_CHECKING:
    from mplug import Run


class SDPA:
    """Causal attention with grouped heads."""

    class Config(BaseModel):
        """It has nothing to set."""

        model_config = ConfigDict(extra="forbid", frozen=True)

    def __init__(self, config: Config) -> None:
        self.config = config

    @hookimpl
    def offer(self) -> list[Offer]:
        """The attention core."""
        from mplug_sdpa.attention import attention

        return [Offer({"Attention.core": attention}, supports, varies)]


def supports(site: Site, run: "Run") -> bool | str:
    """Whatever a wrap may need beyond the attended values, torch's function does not return."""
    return f"it does not offer {', '.join(sorted(site.needs))}" if site.needs else True


def varies(site: Site, run: "Run") -> str:
    """Fused dropout draws its numbers in an order of its own."""
    return "its dropout mask is drawn inside the fused kernel" if site.module.dropout > 0 else ""
