"""Attention by torch's scaled_dot_product_attention, or by one of its backends."""

from functools import partial
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from mplug import MAY_CHANGE, Offer, Site, hookimpl

if TYPE_CHECKING:
    from mplug import Run

Backend = Literal["auto", "cudnn", "flash", "efficient", "math"]
NOTES = {
    "torch": "torch's choice",
    "cudnn": "cuDNN",
    "flash": "torch's flash attention",
    "efficient": "torch's memory-efficient attention",
    "math": "torch's matrix products",
}
"""Supplier -> the note that `mplug explain` prints for it."""
RATES = {"cudnn": 514.0, "flash": 350.0, "torch": 300.0, "efficient": 250.0, "math": 1.0}
"""Supplier -> `Offer.rate`; only cuDNN's is measured. A mask in memory makes matrix products the slowest."""


class SDPA:
    """Attention with grouped heads by torch's scaled_dot_product_attention."""

    class Config(BaseModel):
        """The backend of torch's attention."""

        model_config = ConfigDict(extra="forbid", frozen=True)

        backend: Annotated[Backend, MAY_CHANGE] = Field(
            "auto",
            description="auto: cuDNN on Hopper and newer if it supports the run, otherwise torch's choice; "
            "cudnn, flash, efficient, math: this backend; the run is refused if it does not support the run",
        )

    captures = True
    """The kernels read tensors and shapes only; lengths of documents stay on the device."""

    def __init__(self, config: Config) -> None:
        self.config = config

    @hookimpl
    def offer(self) -> list[Offer]:
        """Offers of the attention core, one for each backend that may be selected."""
        from mplug_sdpa.attention import CORES
        from mplug_sdpa.limits import SERVED

        candidates = ("cudnn", "flash", "torch", "math") if self.config.backend == "auto" else (self.config.backend,)
        supports = self._supports_best if self.config.backend == "auto" else self._supports_configured
        return [
            Offer(
                {"Attention.core": CORES[name]},
                partial(supports, name),
                varies,
                note=partial(_note, name),
                serves=SERVED,
                rate=RATES[name],
                captures=self.captures,
            )
            for name in candidates
        ]

    def _supports_best(self, name: str, site: Site, run: "Run") -> bool | str:
        from mplug_sdpa.limits import auto, nothing_offers

        best = auto(site, run)
        return best == name if best or name != "torch" else nothing_offers(site, run)  # one offer gives the reason

    def _supports_configured(self, name: str, site: Site, run: "Run") -> bool | str:
        from mplug_sdpa.limits import lacking, limit

        if reason := lacking(name, site, run):
            return reason
        reason = limit(name, site, run)
        return f"kernels.sdpa.backend={name} {reason}; set kernels.sdpa.backend=auto" if reason else True


def varies(site: Site, run: "Run") -> str:
    """Why results depend on the layout: fused dropout draws its numbers in an order of its own."""
    return "its dropout mask is drawn inside the fused kernel" if site.module.dropout > 0 else ""


def _note(name: str, site: Site, run: "Run") -> str:
    by_products = name == "torch" and "log-sum-exp" in site.needs  # torch's own choice does not return it
    return NOTES["math" if by_products else name]
