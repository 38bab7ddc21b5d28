"""What the kernels need of a machine: asked before a run starts, not in the middle of its first step."""

from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version

import torch

DISTRIBUTION = "quack-kernels"
CHIP = 9
"""The major compute capability of Hopper: the epilogues are written for what its kernels pass them."""


@cache
def missing() -> str:
    """Why this machine cannot run them, or nothing."""
    try:
        version(DISTRIBUTION)
    except PackageNotFoundError:
        return "QuACK is not installed; install 'mplug-quack[quack]'"
    capability = torch.cuda.get_device_capability()
    if capability[0] != CHIP:
        return f"it is for compute capability {CHIP}.0, and this GPU has {'.'.join(map(str, capability))}"
    try:
        import_module("mplug_quack.epilogues")
    except Exception as error:  # importing it runs QuACK's own checks, which raise whatever they raise
        return f"QuACK is installed and cannot be used: {str(error).partition(chr(10))[0]}"
    return ""
