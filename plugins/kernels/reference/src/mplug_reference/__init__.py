"""The reference for other kernels: attention, norms, activation, loss and scans in eager fp32, in any precision."""

from pydantic import BaseModel, ConfigDict

from mplug import Offer, hookimpl


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
        """Attention, norms, activation, loss, scans and short convolutions."""
        from mplug_reference.wide import OFFERED, SUPPLIERS

        return [
            Offer({slot: supplier}, serves=OFFERED[slot], keeps_pairs=slot == "Attention.core")
            for slot, supplier in SUPPLIERS.items()
        ]
