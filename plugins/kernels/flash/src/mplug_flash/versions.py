"""The versions of flash-attn: which are installed, and the limits of each."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

import torch

from mplug import Site
from mplug_nn.specification import DOCUMENTS, FULL, LOG_SUM_EXP, SINKS, SOFT_CAP, WINDOW

if TYPE_CHECKING:
    from mplug import Run

INSTALL = (
    "install mplug-flash[fa4] for Hopper and Blackwell, mplug-flash[fa2] for Ampere and Ada, "
    "or build flash-attn-3 from its sources for Hopper"
)


@dataclass(frozen=True)
class Version:
    """A version of flash-attn: the distributions that contain it, its module, and its limits.

    `chips` are the major compute capabilities on which it has a backward pass. `head_dims` are the smallest and the
    largest head dim. `serves` are the needs that it serves beyond the plain case, and `chips_of` the major compute
    capabilities for some of them, if they are fewer. `rate` is that of `Offer.rate`; `measured` are the major compute
    capabilities on which it was measured.
    """

    number: int
    distributions: tuple[str, ...]
    module: str
    chips: tuple[int, ...]
    head_dims: tuple[int, int]
    rate: float = 0.0
    measured: tuple[int, ...] = ()
    dropout: bool = False
    serves: frozenset[str] = frozenset({DOCUMENTS, FULL})
    chips_of: Mapping[str, tuple[int, ...]] = field(default_factory=dict, hash=False)

    @property
    def name(self) -> str:
        """'flash-attn-4'."""
        return f"flash-attn-{self.number}"

    @property
    def captures(self) -> bool | str:
        """True for version 4, which a GPU has replayed to the bit (tests/test_gpu_graphs.py); else the reason."""
        return self.number == 4 or f"has not been tested in a CUDA graph with flash-attn {self.number}"

    def rate_on(self, device: str) -> float:
        """Its rate; 0 on a GPU of a generation on which nothing has measured it."""
        is_known = device != "cuda" or not torch.cuda.is_available()
        return self.rate if is_known or torch.cuda.get_device_capability()[0] in self.measured else 0.0

    @property
    def installed(self) -> bool:
        """Whether its metadata is found; versions 2 and 4 share a package, and an import takes seconds."""
        return any(_is_installed(name) for name in self.distributions)


def _is_installed(distribution: str) -> bool:
    try:
        version(distribution)
    except PackageNotFoundError:
        return False
    return True


VERSIONS = {
    4: Version(
        4,
        ("flash-attn-4",),
        "flash_attn.cute.interface",
        chips=(9, 10, 11, 12),
        head_dims=(64, 128),
        rate=588.0,
        measured=(9,),
        serves=frozenset({DOCUMENTS, FULL, LOG_SUM_EXP, WINDOW, SOFT_CAP, SINKS}),
        chips_of=dict.fromkeys((WINDOW, SOFT_CAP, SINKS), (9, 10, 11)),
    ),
    3: Version(3, ("flash-attn-3", "flashattn-hopper"), "flash_attn_interface", chips=(9,), head_dims=(8, 256)),
    2: Version(2, ("flash-attn",), "flash_attn", chips=(8, 9, 10, 11, 12), head_dims=(8, 256), dropout=True),
}
SERVED = frozenset().union(*(version.serves for version in VERSIONS.values()))
"""Needs that some version serves."""


def choose(candidates: Iterable[int], site: Site, run: "Run") -> tuple[int | None, str]:
    """(the first candidate that serves a site of this run, ''), or (None, the reason why none does)."""
    reason = _unfit(site, run)
    if reason:
        return None, reason
    versions = [VERSIONS[number] for number in candidates]
    present = [candidate for candidate in versions if candidate.installed]
    if not present:
        name = versions[0].name if len(versions) == 1 else "flash-attn"
        return None, f"{name} is not installed; {INSTALL}"
    capability = torch.cuda.get_device_capability()
    reasons = []
    for candidate in present:
        reason = _limit(candidate, site, run, capability) or _broken(candidate)
        if not reason:
            return candidate.number, ""
        reasons.append(f"{candidate.name} {reason}")
    return None, "; ".join(reasons)


def _unfit(site: Site, run: "Run") -> str:
    """Why no version can serve the site; the empty string if some may."""
    if run.device != "cuda":
        return "flash-attn needs a CUDA GPU, and this run is on the CPU"
    if run.precision.activations in ("bfloat16", "float16"):
        return ""
    word, format_ = run.config.trainer.precision, run.precision.activations
    return f"flash-attn computes in bf16 or fp16, and trainer.precision={word} computes in {format_}"


def _limit(candidate: Version, site: Site, run: "Run", capability: tuple[int, int]) -> str:
    narrow, wide = candidate.head_dims
    if reason := site.lacking(candidate.serves):
        return f"does not support the site: {reason}"
    chip = ".".join(map(str, capability))
    if capability[0] not in candidate.chips:
        last = max(candidate.chips)
        return f"supports compute capabilities {min(candidate.chips)}.0 to {last}.x, and this GPU has {chip}"
    for need in sorted(site.needs & candidate.chips_of.keys()):
        if capability[0] not in (chips := candidate.chips_of[need]):
            return f"supports {need} on compute capabilities {min(chips)}.0 to {max(chips)}.x, and this GPU has {chip}"
    if not narrow <= site.module.head_dim <= wide or site.module.head_dim % 8:
        return f"supports head dims of {narrow} to {wide} in steps of 8, and this head dim is {site.module.head_dim}"
    if site.module.dropout > 0 and not candidate.dropout:
        return f"does not support dropout, and attention dropout is {site.module.dropout:g}"
    if candidate.number == 4 and capability[0] == 12 and run.config.trainer.deterministic:
        return "has no deterministic backward on this GPU, and trainer.deterministic is set"
    return ""


@cache
def _broken(candidate: Version) -> str:
    """Why an installed version cannot be imported; checked before a run starts, not in its first step."""
    try:
        import_module(candidate.module)
    except (ImportError, OSError) as error:
        return f"is installed and cannot be imported: {str(error).partition(chr(10))[0]}"
    return ""
