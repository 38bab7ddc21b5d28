"""Scans and short convolutions by flash-linear-attention: Triton kernels for NVIDIA GPUs from Ampere on, in bf16."""

from functools import partial

from pydantic import BaseModel, ConfigDict, Field

from mplug import Offer, hookimpl


class Fla:
    """The recurrences and the short convolutions of mixers of tokens."""

    class Config(BaseModel):
        """The consent to kernels that have failed."""

        model_config = ConfigDict(extra="forbid", frozen=True)

        experimental: bool = Field(
            False, description="use the kernels, although a large decoder failed with them on a GPU (see the README)"
        )

    captures = "has not been tested in a CUDA graph yet"
    """Unknown: no run on a GPU has replayed these kernels yet."""

    def __init__(self, config: Config) -> None:
        self.config = config

    @hookimpl
    def offer(self) -> list[Offer]:
        """One offer of each slot, and a second one of scans for compilers that miscompile a kernel."""
        from mplug_fla.convolution import convolution
        from mplug_fla.limits import CHIPS, DTYPES, note, supports_convolution, supports_scan
        from mplug_fla.scans import scan, scan_by_channel
        from mplug_nn.mixers.specification import CONVOLUTIONS, SCANS

        experimental = self.config.experimental
        return [
            *(
                Offer(
                    {"Scan.core": supplier},
                    partial(supports_scan, experimental, by_channel),
                    note=partial(note, by_channel),
                    serves=SCANS,
                    devices=("cuda",),
                    dtypes=DTYPES,
                    chips=CHIPS,
                )
                for by_channel, supplier in ((False, scan), (True, scan_by_channel))
            ),
            Offer(
                {"Convolution.core": convolution},
                partial(supports_convolution, experimental),
                serves=CONVOLUTIONS,
                devices=("cuda",),
                dtypes=DTYPES,
                chips=CHIPS,
            ),
        ]
