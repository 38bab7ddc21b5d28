"""The reference for other kernels: attention, norms, activation and loss in eager fp32, in a run of any precision."""

from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict

from mplug import Offer, Site, hookimpl

if TYPE_CHECKING:
    from mplug import Run


class Reference:
    """The compositions of `mplug_nn`, computed in fp32."""

    class Config(BaseModel):
        """No options."""

        model_config = ConfigDict(extra="forbid", frozen=True)

    captures = True
    """The compositions launch the same kernels in every step."""

    def __init__(self, config: Config) -> None:
        self.config = config

    @hookimpl
    def offer(self) -> list[Offer]:
        """Attention, norms, activation and loss."""
        from mplug_reference.wide import SUPPLIERS

        return [Offer({slot: supplier}, _supports) for slot, supplier in SUPPLIERS.items()]


def _supports(site: Site, run: "Run") -> bool | str:
    from mplug_reference.wide import OFFERED

    return site.lacking(OFFERED.get(site.slot, ())) or True
