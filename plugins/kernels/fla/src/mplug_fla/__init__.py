"""Scans and short convolutions by flash-linear-attention: Triton kernels for NVIDIA GPUs from Ampere on, in bf16."""

from functools import partial
from typing import TYPE_CHECKING

from mplug import DOCUMENTS, Offer, hookimpl
from mplug_fla.config import FlaConfig

if TYPE_CHECKING:
    from mplug import Run


class Fla:
    """The recurrences and the short convolutions of mixers of tokens."""

    Config = FlaConfig

    def __init__(self, config: FlaConfig) -> None:
        self.config = config

    @hookimpl
    def captures(self, run: "Run") -> bool | str:
        """True unless samples are packed: a GPU has replayed the kernels to the bit (tests/test_gpu_graphs.py)."""
        return DOCUMENTS not in run.entries or "copies the lengths of packed documents to the CPU"

    @hookimpl
    def offer(self) -> list[Offer]:
        """One offer of each slot, and a second one of scans for compilers that miscompile a kernel."""
        from mplug_fla.convolution import convolution
        from mplug_fla.limits import CHIPS, DTYPES, note, supports_convolution, supports_scan
        from mplug_fla.scans import scan, scan_by_channel
        from mplug_nn.mixers.specification import CONVOLUTIONS, SCANS

        supports = partial(supports_scan, self.config)
        return [
            *(
                Offer(
                    {"Scan.core": supplier},
                    partial(supports, by_channel),
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
                partial(supports_convolution, self.config),
                serves=CONVOLUTIONS,
                devices=("cuda",),
                dtypes=DTYPES,
                chips=CHIPS,
            ),
        ]
