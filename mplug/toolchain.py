"""What this machine can build kernels with. Torch-free."""

import os
import shutil
import sysconfig
from importlib.util import find_spec
from pathlib import Path


def triton_builds() -> bool:
    """Whether Triton is installed, and what it builds its launchers with: a C compiler and Python's headers."""
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    headers = Path(sysconfig.get_path("include"), "Python.h")
    return find_spec("triton") is not None and compiler is not None and headers.exists()
