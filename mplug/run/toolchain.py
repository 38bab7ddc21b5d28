"""The tools for building kernels on this machine. Importing this module imports no torch."""

import os
import shutil
import sysconfig
from pathlib import Path


def triton_builds() -> bool:
    """Whether Triton is installed, with the tools that build its launchers: a C compiler and Python's headers."""
    from torch.utils._triton import has_triton_package

    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    headers = Path(sysconfig.get_path("include"), "Python.h")
    return has_triton_package() and compiler is not None and headers.exists()
