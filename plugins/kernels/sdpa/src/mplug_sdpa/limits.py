"""What torch's backends of attention cannot do, as torch itself checks it before it takes one."""

from typing import TYPE_CHECKING

import torch

from mplug import Site

if TYPE_CHECKING:
    from mplug import Run

HOPPER = (9, 0)
AMPERE = (8, 0)
FIRST_SOUND_CUDNN = 91501
"""Older ones are not sound where 128 does not divide the length of the sequence (pytorch #169849)."""


def auto(site: Site, run: "Run") -> str:
    """The supplier that serves a site best: 'cudnn', or 'torch' for what torch takes by itself."""
    hopper = run.device == "cuda" and torch.cuda.get_device_capability() >= HOPPER
    return "cudnn" if hopper and not limit("cudnn", site, run) else "torch"


def limit(backend: str, site: Site, run: "Run") -> str:
    """Why a backend cannot serve a site of a run; the empty string where it can."""
    if backend == "math":
        return ""
    if run.device != "cuda":
        return "is for CUDA GPUs, and this run is on the CPU"
    capability, precision = torch.cuda.get_device_capability(), run.config.trainer.precision
    if precision != "fp32" and capability < AMPERE:
        return (
            f"computes in {precision} on GPUs of compute capability 8.0 and newer; this one has {_dotted(capability)}"
        )
    if backend == "efficient":
        multiple = 4 if precision == "fp32" else 8
        return "" if site.module.head_dim % multiple == 0 else _other_head_dim(site, f"multiples of {multiple}")
    if precision == "fp32":
        return "computes in bf16, and trainer.precision is fp32"
    return _flash_limit(site, capability) if backend == "flash" else _cudnn_limit(site, run)


def _flash_limit(site: Site, capability: tuple[int, int]) -> str:
    small = capability in ((8, 6), (8, 9)) or capability[0] == 12  # too little shared memory for wide heads' backward
    most = 192 if small else 256
    fits = site.module.head_dim % 8 == 0 and site.module.head_dim <= most
    return "" if fits else _other_head_dim(site, f"multiples of 8 up to {most}")


def _cudnn_limit(site: Site, run: "Run") -> str:
    version, dropout = torch.backends.cudnn.version() or 0, site.module.dropout
    if run.config.trainer.deterministic:
        return "has a backward that does not give the same bits twice, and trainer.deterministic is set"
    if not version:
        return "needs cuDNN, which this torch does not have"
    if version < FIRST_SOUND_CUDNN and run.config.trainer.seq_length % 128:
        return f"needs cuDNN 9.15.1 or newer where 128 does not divide trainer.seq_length, and torch has {version}"
    if site.module.head_dim % 8 or site.module.head_dim > 128:
        return _other_head_dim(site, "multiples of 8 up to 128")
    if dropout * 16 % 1:
        return f"drops weights by sixteenths, and attention dropout is {dropout:g}"
    return ""


def _other_head_dim(site: Site, which: str) -> str:
    return f"takes head dims that are {which}, and this one is {site.module.head_dim}"


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))
