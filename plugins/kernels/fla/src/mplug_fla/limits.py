"""What flash-linear-attention can compute, and whether this machine can run it: checked before a run starts."""

from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

import torch

from mplug import Site, triton_builds
from mplug_fla.variants import keep
from mplug_nn import ConvolutionSpec, ScanSpec

if TYPE_CHECKING:
    from mplug import Run
    from mplug_fla.config import FlaConfig

DISTRIBUTION = "fla-core"
RELEASE = (0, 6)
"""The minor release whose forward and backward passes this plugin calls."""
DTYPES = ("bfloat16",)
"""The kernels keep the state between chunks in the format of the keys: fp16 overflows, and fp32 products are TF32."""
CHIPS = ("8.0+",)
KEY_WIDTHS = range(16, 257)
VALUE_WIDTHS = range(16, 513)
CONVOLUTION_WIDTHS = range(2, 9)
HOPPER = 9
MISCOMPILING = ((3, 4, 0), (3, 7, 1))
"""From, and below: releases of Triton that miscompile `chunk_bwd_dqkwg` on Hopper (issue 640 of the library)."""


def supports_scan(config: "FlaConfig", by_channel: bool, site: Site, run: "Run") -> bool | str:
    """True if the kernels compute the site; else the reason. The second offer is for the sites of `takes_channels`."""
    spec = getattr(site.module, "spec", None)
    if not isinstance(spec, ScanSpec):
        return False
    for what, width, widths in (("keys", spec.key_width, KEY_WIDTHS), ("values", spec.value_width, VALUE_WIDTHS)):
        if width not in widths:
            reason = f"it supports widths of {what} of {widths[0]} to {widths[-1]}, and this site's width is {width}"
            return False if by_channel else reason
    reason = _unfit(config, run)
    if reason:
        return False if by_channel else reason
    return by_channel == takes_channels(spec)


def supports_convolution(config: "FlaConfig", site: Site, run: "Run") -> bool | str:
    """True if the kernels compute the site; else the reason."""
    spec = getattr(site.module, "spec", None)
    if not isinstance(spec, ConvolutionSpec):
        return False
    if spec.width not in CONVOLUTION_WIDTHS:
        first, last = CONVOLUTION_WIDTHS[0], CONVOLUTION_WIDTHS[-1]
        return f"it supports convolutions over {first} to {last} positions, and this one spans {spec.width}"
    return _unfit(config, run) or True


def takes_channels(spec: ScanSpec) -> bool:
    """Whether a scan with one decay per head must be computed with a decay for each channel of a key.

    The results are the same. The decays take as many bytes as the keys in fp32, and the kernels are slower.
    """
    return not spec.by_channel and miscompiles(torch.cuda.get_device_capability(), _release("triton"))


def miscompiles(capability: tuple[int, int], triton: tuple[int, ...]) -> bool:
    """Whether a release of Triton miscompiles the backward kernel of decays per head on this chip."""
    first, fixed = MISCOMPILING
    return capability[0] == HOPPER and first <= triton < fixed


def note(by_channel: bool, site: Site, run: "Run") -> str:
    """Which kernels compute the site, if they are not those for its kind."""
    if not by_channel:
        return ""
    return f"decays per channel, because Triton {'.'.join(map(str, _release('triton')))} miscompiles decays per head"


def _unfit(config: "FlaConfig", run: "Run") -> str:
    if run.config.trainer.deterministic:
        return (
            "each process chooses among its kernels by their speed, so sums may be in another order, and "
            "trainer.deterministic is set"
        )
    if reason := missing():
        return reason
    if config.variants is not None:
        keep(config.variants)
    return ""


@cache
def missing() -> str:
    """Why this machine cannot run the kernels, or the empty string."""
    install = "install 'mplug-fla[fla]'"
    try:
        own = _release(DISTRIBUTION)
    except PackageNotFoundError:
        return f"flash-linear-attention is not installed; {install}"
    if own[:2] != RELEASE:
        return (
            f"it supports fla-core {'.'.join(map(str, RELEASE))}, and {version(DISTRIBUTION)} is installed; {install}"
        )
    if not triton_builds():
        return "it needs Triton, a C compiler and Python's headers, and one of them is not installed"
    try:
        import_module("mplug_fla.library").load()
    except Exception as error:  # the library's import looks for devices and compilers, and may raise anything
        return f"flash-linear-attention is installed, and its import fails: {str(error).partition(chr(10))[0]}"
    return ""


@cache
def _release(distribution: str) -> tuple[int, ...]:
    """The numbers of an installed distribution's version: '3.6.0+git' -> (3, 6, 0)."""
    numbers = []
    for part in version(distribution).partition("+")[0].split(".")[:3]:
        digits = "".join(letter for letter in part if letter.isdigit())
        if not digits:
            break
        numbers.append(int(digits))
    return tuple(numbers)
