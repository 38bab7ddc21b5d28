"""The limits of torch's attention backends, the same as those that torch checks before it selects one."""

from typing import TYPE_CHECKING

import torch

from mplug import Site
from mplug_nn.specification import (
    BIASES,
    CAPABILITIES,
    CROSS,
    DOCUMENTS,
    FULL,
    KEY_LENGTH,
    LOG_SUM_EXP,
    POSITION_GROUPS,
    STATIC_KEYS,
    VALUE_WIDTH,
    WINDOW,
)

if TYPE_CHECKING:
    from mplug import Run

HALF = ("bfloat16", "float16")
HOPPER = (9, 0)
AMPERE = (8, 0)
LOWERED = "fails in half precision on this CPU, because ATEN_CPU_CAPABILITY hides its AVX-512"
"""Torch's CPU attention selects its layout by the processor, but its code by ATEN_CPU_CAPABILITY."""
FIRST_SOUND_CUDNN = 91501
"""Older versions give wrong results if 128 does not divide the sequence length (pytorch #169849)."""


MASKED = {DOCUMENTS, WINDOW, POSITION_GROUPS, CROSS, *BIASES}
"""Needs that a mask in memory can express."""
OFFERED = {
    "torch": {*CAPABILITIES, FULL, VALUE_WIDTH, KEY_LENGTH, STATIC_KEYS, CROSS},
    "cudnn": {LOG_SUM_EXP, FULL},
    "flash": {LOG_SUM_EXP, FULL, DOCUMENTS},
    "efficient": {FULL},
    "math": {*CAPABILITIES, FULL, VALUE_WIDTH, KEY_LENGTH, STATIC_KEYS, *MASKED},
}
"""Supplier -> needs that it serves beyond the plain case.

'torch' serves MASKED too on a CPU, and at sites with keys from a cache, where a mask has few rows (`lacking`). The mask
of cross-attention has one row.
"""
SERVED = frozenset({*CAPABILITIES, FULL, VALUE_WIDTH, KEY_LENGTH, STATIC_KEYS, *MASKED})
"""The needs that at least one supplier serves."""


def auto(site: Site, run: "Run") -> str:
    """The best supplier for a site, or the empty string if none serves its needs.

    Candidates in order: 'cudnn' on Hopper and newer; 'flash' on a GPU if the site has needs; 'torch', which is torch's
    own choice; 'math' if torch's choice fails on a CPU, or if a GPU site needs a mask in memory for a window or bias.
    """
    by_mask = site.needs & (MASKED - {DOCUMENTS})
    candidates = ["torch", "math"] if run.device == "cpu" or by_mask else ["torch"]
    if run.device == "cuda" and site.needs:
        candidates.insert(0, "flash")
    if run.device == "cuda" and torch.cuda.get_device_capability() >= HOPPER:
        candidates.insert(0, "cudnn")
    return next((name for name in candidates if not lacking(name, site, run) and not limit(name, site, run)), "")


def lacking(backend: str, site: Site, run: "Run") -> str:
    """The needs of a site that a backend does not serve, as a message; the empty string if it serves all."""
    few_rows = run.device == "cpu" or KEY_LENGTH in site.needs
    masked = MASKED if backend == "torch" and few_rows else set()
    return site.lacking(OFFERED[backend] | masked)


def nothing_offers(site: Site, run: "Run") -> str:
    """The message if `auto` finds no supplier for a site."""
    reason = lacking("torch", site, run)
    if lacking("flash", site, run):
        return reason
    return f"{reason}; torch's flash attention offers it, but {limit('flash', site, run)}"


def limit(backend: str, site: Site, run: "Run") -> str:
    """Why a backend cannot serve a site of this run; the empty string if it can."""
    if backend == "math":
        return ""
    if backend == "torch":
        lowered = run.device == "cpu" and run.precision.activations in HALF and capability_is_lowered()
        return LOWERED if lowered else ""
    if run.device != "cuda":
        return "needs a CUDA GPU, and this run is on the CPU"
    capability, computed = torch.cuda.get_device_capability(), run.precision.activations
    if computed not in (*HALF, "float32"):
        return f"does not support {computed}, and trainer.precision={run.config.trainer.precision} computes in it"
    if computed != "float32" and capability < AMPERE:
        return (
            f"supports {computed} on GPUs of compute capability 8.0 and newer, and this GPU has {_dotted(capability)}"
        )
    if backend == "efficient":
        multiple = 4 if computed == "float32" else 8
        return "" if site.module.head_dim % multiple == 0 else _other_head_dim(site, f"multiples of {multiple}")
    if computed == "float32":
        return f"computes in bf16 or fp16, and trainer.precision={run.config.trainer.precision} computes in fp32"
    return _flash_limit(site, capability) if backend == "flash" else _cudnn_limit(site, run)


def capability_is_lowered() -> bool:
    """Whether ATEN_CPU_CAPABILITY hides AVX-512 from torch on a processor that has it."""
    return torch.cpu._is_avx512_supported() and "AVX512" not in torch.backends.cpu.get_cpu_capability()


def _flash_limit(site: Site, capability: tuple[int, int]) -> str:
    small = capability in ((8, 6), (8, 9)) or capability[0] == 12  # little shared memory: no backward of wide heads
    widest = 192 if small else 256
    fits = site.module.head_dim % 8 == 0 and site.module.head_dim <= widest
    return "" if fits else _other_head_dim(site, f"multiples of 8 up to {widest}")


def _cudnn_limit(site: Site, run: "Run") -> str:
    version, dropout = torch.backends.cudnn.version() or 0, site.module.dropout
    uneven = run.config.trainer.seq_length % 128 != 0 or LOG_SUM_EXP in site.needs  # parts have any length
    if run.config.trainer.deterministic:
        return "has no deterministic backward, and trainer.deterministic is set"
    if not version:
        return "needs cuDNN, and this torch is built without it"
    if version < FIRST_SOUND_CUDNN and uneven:
        return f"needs cuDNN 9.15.1 or newer if 128 does not divide the sequence length, and torch has {version}"
    if site.module.head_dim % 8 or site.module.head_dim > 128:
        return _other_head_dim(site, "multiples of 8 up to 128")
    if dropout * 16 % 1:
        return f"supports dropout in steps of 1/16, and attention dropout is {dropout:g}"
    return ""


def _other_head_dim(site: Site, supported: str) -> str:
    return f"supports head dims that are {supported}, and this head dim is {site.module.head_dim}"


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))
