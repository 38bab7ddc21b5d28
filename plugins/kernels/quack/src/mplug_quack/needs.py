"""Checks whether this machine can run the kernels, before a run starts and not in its first step."""

from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version

import torch

DISTRIBUTION = "quack-kernels"
CHIP = 9
"""The major compute capability of Hopper; the epilogues rely on the arguments that QuACK's Hopper kernels pass."""
EPILOGUES, PRODUCTS = "mplug_quack.epilogues", "quack.gemm"
"""The modules that the kernels of an MLP need, and those of experts."""


@cache
def missing(module: str) -> str:
    """Why this machine cannot run the kernels that need a module, or the empty string."""
    try:
        version(DISTRIBUTION)
    except PackageNotFoundError:
        return "QuACK is not installed; install 'mplug-quack[quack]'"
    capability = torch.cuda.get_device_capability()
    if capability[0] != CHIP:
        return f"it supports compute capability {CHIP}.0, and this GPU has {'.'.join(map(str, capability))}"
    try:
        import_module(module)
    except Exception as error:  # the import runs QuACK's own checks, which may raise anything
        return f"QuACK is installed, and its import fails: {str(error).partition(chr(10))[0]}"
    return ""
