"""Attention by torch's flex_attention: one fused kernel for everything that a specification can ask for."""

from functools import partial
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict

from mplug import Offer, Site, hookimpl

if TYPE_CHECKING:
    from mplug import Run


RATE = 150.0
"""`Offer.rate` on a GPU, not measured; on a CPU, where it is not compiled, it does not compete."""


class Flex:
    """Attention with windows, soft cap, documents, biases and attention sinks, without a mask in memory."""

    class Config(BaseModel):
        """No options."""

        model_config = ConfigDict(extra="forbid", frozen=True)

    captures = "has not been tested in a CUDA graph yet"
    """Unknown: no run on a GPU has replayed all of these kernels yet."""

    def __init__(self, config: Config) -> None:
        self.config = config

    @hookimpl
    def offer(self) -> list[Offer]:
        """The offer of the attention core."""
        from mplug_flex.attention import attention
        from mplug_flex.limits import OFFERED, supports

        supplier = {"Attention.core": attention}
        return [
            Offer(supplier, partial(supports, "cuda"), serves=OFFERED, rate=RATE, captures=self.captures),
            Offer(supplier, partial(supports, "cpu"), note=_note, serves=OFFERED, captures=self.captures),
        ]


def _note(site: Site, run: "Run") -> str:
    return "not compiled on a CPU"
